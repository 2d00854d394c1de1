"""The score warpgroups with swap A/B and 16-bit latent keys: S^T = K Q^T, softmax, P^T.

The warpgroups take tiles in turns. Keys are M of the wgmmas, straight from shared memory; heads are N.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr
from cutlass.utils import hopper_helpers as sm90

from dsa.cute.pipeline import state_at, state_at_of_two
from dsa.cute.sm90 import opaque
from dsa.kernels.mla.limits import TILE_N
from dsa.kernels.mla.mla_attention import MlaShared
from dsa.kernels.mla.mla_epilogue import Results
from dsa.kernels.mla.mla_tiles import (
    K16,
    K_CHUNK,
    K_PER_V,
    ROPE_AFTER,
    ROPE_CHUNK,
    V_CHUNKS,
    KvPipeline,
    KvState,
    k_chunk_order,
)
from dsa.kernels.mla.swap_ab_exchange import HeadRange, Thread
from dsa.kernels.mla.swap_ab_score_loop import SwapAbScoreLoop
from dsa.kernels.mla.topk_gather import TopkGather

SCORE_WARPGROUPS = 2


class ScoreOperands(NamedTuple):
    """Tiled MMA, accumulator, and v chunks (rk), rope parts (rr) and Q (rq) as wgmma operands."""

    mma: cute.TiledMma
    rk: cute.Tensor
    rr: cute.Tensor
    rq: cute.Tensor
    acc: cute.Tensor


class SwapAbScores(SwapAbScoreLoop):
    """Scores for keys in `kv` and `head_tile` heads, 16 or 32; `with_max_logits` also writes the maximum logits."""

    def __init__(self, kv: TopkGather, head_tile: int, with_max_logits: bool):
        super().__init__(head_tile, SCORE_WARPGROUPS, kv.dtype, key_exponents=False, with_max_logits=with_max_logits)
        self.kv, self.dtype, self.order = kv, kv.dtype, k_chunk_order(kv.head_dim)

    def tiled_mmas(self) -> cute.TiledMma:
        k_major, shape = cute.nvgpu.OperandMajorMode.K, (TILE_N, self.head_tile)
        return sm90.make_trivial_tiled_mma(self.dtype, self.dtype, k_major, k_major, Float32, (1, 1, 1), shape)

    @cute.jit
    def score_mainloop(
        self,
        results: Results,
        mma: cute.TiledMma,
        shared: MlaShared,
        heads: HeadRange,
        group,
        scale,
        thread: Thread,
    ):
        """Run a score warpgroup: all work tiles of this CTA."""
        thr = mma.get_slice(thread.tid)
        rk, rr = [mma.make_fragment_A(thr.partition_A(stages)) for stages in (shared.kv.v, shared.kv.rope)]
        rq = mma.make_fragment_B(thr.partition_B(shared.exchange.q))
        acc = cute.make_rmem_tensor(thr.partition_shape_C((TILE_N, self.head_tile)), Float32)
        self.run(results, ScoreOperands(mma, rk, rr, rq, acc), shared, heads, group, scale, thread)

    @cute.jit
    def score_tile(
        self,
        operands: ScoreOperands,
        shared: MlaShared,
        q_power,
        ring,
        tile_count,
        tile,
        max_logits,
        scale,
        thread: Thread,
    ):
        pipeline, exchange = shared.pipeline, shared.exchange
        self.start_scores(operands, pipeline, ring + tile)
        p_state = state_at_of_two(tile_count + tile)
        exchange.p_pipeline.producer_wait(p_state)
        cute.nvgpu.warpgroup.wait_group(0)
        rope = state_at(ring + tile, self.kv.rope_stages)
        valid_mask = pipeline.valid_mask[thread.warp, rope.stage]
        self.softmax(operands.acc, exchange, valid_mask, None, None, max_logits, scale, p_state, thread)
        self.kv.release(pipeline.rope, rope)

    @cute.jit
    def load_q(self, operands: ScoreOperands, shared: MlaShared, ring, heads: HeadRange, thread: Thread) -> None:
        """Copy Q, which came row by row as tile `ring` of the ring, to its own memory, one k chunk after the other."""
        pipeline, rope = shared.pipeline, state_at(ring, self.kv.rope_stages)
        vector = cute.make_rmem_tensor((8,), self.dtype)
        target = cute.recast_ptr(shared.exchange.q.iterator, cute.make_swizzle(0, 4, 3), dtype=self.dtype)
        for n, chunk in enumerate(self.order):
            stages, place = shared.kv.rope, rope.stage
            if const_expr(chunk < ROPE_CHUNK):
                v = state_at(ring * V_CHUNKS + self.v_chunk_of(n), self.kv.v_stages)
                stages, place = shared.kv.v, v.stage * K_PER_V + chunk % K_PER_V
                pipeline.v.consumer_wait(v, chunk % K_PER_V)
            else:
                pipeline.rope.consumer_wait(rope)
            source = cute.recast_ptr(stages.iterator, cute.make_swizzle(0, 4, 3), dtype=self.dtype)
            source += place * (TILE_N * K_CHUNK)
            # Rows have 128 bytes: 8 vectors for each of 16 or 32 rows.
            here = self.number(thread) * 8
            if here < self.head_tile * K_CHUNK:
                cute.autovec_copy(cute.make_tensor(source + here, cute.make_layout(8)), vector)
                there = cute.make_tensor(target + (chunk * self.head_tile * K_CHUNK + here), cute.make_layout(8))
                cute.autovec_copy(vector, there)
        self.sync_score()
        if thread.side == 0:
            for n in cutlass.range_constexpr(V_CHUNKS):
                self.kv.release(pipeline.v, state_at(ring * V_CHUNKS + n, self.kv.v_stages))
            self.kv.release(pipeline.rope, rope)

    def v_chunk_of(self, n: int) -> int:
        """Return the v chunk, counted in load order, of the k chunk that is n-th in load order."""
        return sum(chunk < ROPE_CHUNK for chunk in self.order[:n]) // K_PER_V

    @cute.jit
    def start_scores(self, operands: ScoreOperands, pipeline: KvPipeline, ring):
        """Issue acc = K Q^T of tile `ring` of the ring, as the tile's parts arrive."""
        mma, acc = operands.mma, operands.acc
        rope = state_at(ring, self.kv.rope_stages)
        last = state_at(ring * V_CHUNKS + V_CHUNKS - 1, self.kv.v_stages)
        cute.nvgpu.warpgroup.fence()
        loaded = self.kv.tile_is_loaded(pipeline, KvState(last, rope))
        for n, chunk in enumerate(self.order):
            v = state_at(ring * V_CHUNKS + self.v_chunk_of(n), self.kv.v_stages)
            if not loaded:
                if const_expr(n == ROPE_AFTER * K_PER_V):
                    pipeline.rope.consumer_wait(rope)
                if const_expr(chunk < ROPE_CHUNK):
                    pipeline.v.consumer_wait(v, chunk % K_PER_V)
                self.kv.fence()
            own_v, own_rope = opaque(v.stage), opaque(rope.stage)
            for step in cutlass.range_constexpr(K_CHUNK // K16):
                a = operands.rr[None, None, step, own_rope]
                if const_expr(chunk < ROPE_CHUNK):
                    a = operands.rk[None, None, chunk % K_PER_V * (K_CHUNK // K16) + step, own_v]
                mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, n + step > 0)
                cute.gemm(mma, acc, a, operands.rq[None, None, chunk * (K_CHUNK // K16) + step, 0], acc)
        cute.nvgpu.warpgroup.commit_group()
