"""Sparse MLA attention over selected 16-bit latent keys with up to 32 heads, with swap A/B.

o[t, h] = sum_j softmax_j(scale * q[t, h] . k[j]) k[j, :512]

The sum runs over the selected keys j of query t. q and k have 576 or 512 channels. The kernel serves prefill
and decoding.

This is sparse_mla_sm90.py with swap A/B: S^T = K Q^T and O^T += V^T P^T. M of the wgmmas is keys (S^T) or channels
(O^T), and operand A is read from shared memory; N is heads. The wgmmas for 16 heads take a quarter of the time of those
for 64 heads.
Work, scheduler, launch: sparse_mla_kernel.py; a CTA computes all heads of a query.
Warp roles: two score warpgroups, which take the tiles in turns, two output warpgroups, and a load warpgroup
(topk_gather.py). The consumers' mainloops are in swap_ab_attention.py.
Epilogue: a warp has 16 of each 64 channels, and a lane has channels lane / 4 and lane / 4 + 8 of these 16. The warps
transpose O^T through shared memory, so that a lane stores 16 bytes of a head's O at a time. They store partial results
directly to global memory, one fp32 channel at a time.
Shared memory: Q, two stages of P^T, a ring of 16 KiB v chunks and, for 576 channels, a ring of 8 KiB rope parts. The
rings have room for two to three tiles of keys.
Constraints: limits.py; rows of q and keys start at multiples of 16 bytes.
Roofline: bound by shared memory. Per tile of 576 channels, shared memory receives 72 KiB and delivers 136 KiB of keys
and, for 16 heads, 32 KiB of Q and P to the wgmmas: 1920 cycles. The L2 cache takes 1850 cycles to deliver a tile to
every SM (measured with plain loads).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from dsa.cute.fake_tensors import cute_dtype
from dsa.cute.pipeline import PipelineState, state_at, state_at_of_two
from dsa.cute.shared_memory import pack, store_transposed
from dsa.cute.sm90 import opaque
from dsa.kernels.mla.limits import DTYPES, HEAD_DIM, HEAD_DIM_V, SPARSE_HEAD_DIMS, SWAP_AB_HEADS, TILE_N
from dsa.kernels.mla.mla_roles import Coord, MlaShared, Results, RoleRegisters, Thread, WorkTileInfo
from dsa.kernels.mla.mla_tiles import (
    K16,
    K_CHUNK,
    K_PER_V,
    ROPE_AFTER,
    ROPE_CHUNK,
    V_CHUNK,
    V_CHUNKS,
    KvPipeline,
    KvState,
    k_chunk_order,
    tiled_mma,
)
from dsa.kernels.mla.sparse_mla_kernel import fake_arguments, fake_cache
from dsa.kernels.mla.swap_ab_attention import SwapAbAttention, ValueOperands
from dsa.kernels.mla.topk_gather import TopkGather
from dsa.runtime.compile_cache import cached, compile_sm90

V_STAGES = {(HEAD_DIM, 16): 11, (HEAD_DIM, 32): 9, (HEAD_DIM_V, 16): 12, (HEAD_DIM_V, 32): 10}
ROPE_STAGES = 2
SCORE_WARPGROUPS = 2
REGISTERS = RoleRegisters(96, 112, 64)


class ScoreOperands(NamedTuple):
    """Tiled MMA (`mma`) and accumulator (`acc`) of S^T. The other fields are wgmma operands in shared memory: the
    stages of v chunks (`rk`) and of rope parts (`rr`), and Q (`rq`)."""

    mma: cute.TiledMma
    rk: cute.Tensor
    rr: cute.Tensor
    rq: cute.Tensor
    acc: cute.Tensor


class SparseMlaSwapAbSm90(SwapAbAttention):
    """Sparse MLA over keys of `head_dim` channels, with `head_tile` heads, 16 or 32, per CTA.

    with_max_logits: also write the maximum logits.
    """

    all_heads = True

    acc_channels = V_CHUNK

    def __init__(self, dtype: type[cutlass.Numeric], head_dim: int, head_tile: int, with_max_logits: bool):
        kv = TopkGather(dtype, head_dim, V_STAGES[head_dim, head_tile], ROPE_STAGES)
        super().__init__(kv, dtype, head_tile, SCORE_WARPGROUPS, REGISTERS, with_max_logits)
        self.dtype, self.order = dtype, k_chunk_order(head_dim)

    def operand_storage(self) -> type:
        @cute.struct
        class OperandStorage:
            staging: cute.struct.Align[cute.struct.MemRange[self.kv.dtype, 8 * 16 * self.head_tile], 128]
            kv: self.kv.tensor_storage()

        return OperandStorage

    def tiled_mmas(self) -> list[cute.TiledMma]:
        return [tiled_mma(self.dtype, majors, (TILE_N, self.head_tile)) for majors in ("K K", "MN MN")]

    def shared(self, storage) -> MlaShared:
        return MlaShared(
            self.kv.pipeline(storage.pipeline),
            self.exchange_memory.exchange(storage.exchange),
            self.kv.tensors(storage.operands.kv),
            staging=storage.operands.staging.data_ptr(),
        )

    def thread(self, warp, lane) -> Thread:
        return Thread(warp // 4 % SCORE_WARPGROUPS, warp % 4, lane)

    @cute.jit
    def score(self, q, results: Results, shared: MlaShared, mmas, group, scale, coord: Coord):
        mma = mmas[0]
        thr = mma.get_slice(coord.thread.tid)
        rk, rr = [mma.make_fragment_A(thr.partition_A(stages)) for stages in (shared.kv.v, shared.kv.rope)]
        rq = mma.make_fragment_B(thr.partition_B(shared.exchange.q))
        acc = cute.make_rmem_tensor(thr.partition_shape_C((TILE_N, self.head_tile)), Float32)
        self.score_mainloop(results, ScoreOperands(mma, rk, rr, rq, acc), shared, group, scale, coord)

    @cute.jit
    def output(self, results: Results, shared: MlaShared, mmas, group, coord: Coord):
        mma, keys, thread = mmas[1], shared.kv.v, coord.thread
        values = cute.make_tensor(keys.iterator, cute.select(keys.layout, mode=[1, 0, 2]))
        v = mma.make_fragment_A(mma.get_slice(thread.tid).partition_A(values))
        self.output_mainloop(results, mma, v, shared, PipelineState(thread.side, Int32(0)), group, coord)

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
    def load_q(self, operands: ScoreOperands, shared: MlaShared, ring, coord: Coord) -> None:
        """Copy Q from tile number `ring` of the ring of keys to the memory of Q, one k chunk after the other.

        The load warps have gathered the heads' rows of Q into the stages of this tile in the same way as keys.
        """
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
            # A head has 8 vectors of 16 bytes in a chunk, so the first 8 * head_tile threads copy one vector each.
            here = self.number(coord.thread) * 8
            if here < self.head_tile * K_CHUNK:
                cute.autovec_copy(cute.make_tensor(source + here, cute.make_layout(8)), vector)
                there = cute.make_tensor(target + (chunk * self.head_tile * K_CHUNK + here), cute.make_layout(8))
                cute.autovec_copy(vector, there)
        self.sync_score()
        if coord.thread.side == 0:
            for n in cutlass.range_constexpr(V_CHUNKS):
                self.kv.release(pipeline.v, state_at(ring * V_CHUNKS + n, self.kv.v_stages))
            self.kv.release(pipeline.rope, rope)

    def v_chunk_of(self, n: int) -> int:
        """Return the position in V_CHUNK_ORDER of the v chunk that contains the n-th loaded k chunk. If the k chunk is
        the rope part, the result has no meaning."""
        return sum(chunk < ROPE_CHUNK for chunk in self.order[:n]) // K_PER_V

    @cute.jit
    def start_scores(self, operands: ScoreOperands, pipeline: KvPipeline, ring):
        """Issue acc = K Q^T of tile number `ring` of the ring of keys, chunk by chunk as keys arrive."""
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

    @cute.jit
    def skip_q(self, pipeline: KvPipeline, state: PipelineState) -> PipelineState:
        return pipeline.v.skip(state, V_CHUNKS)

    @cute.jit
    def add_tile(
        self,
        operands: ValueOperands,
        shared: MlaShared,
        state: PipelineState,
        tile_count,
        thread: Thread,
    ) -> PipelineState:
        """See `SwapAbAttention`. This warpgroup reads two v chunks of the tile; `state` is the ring state of the first
        one."""
        pipeline, exchange = shared.pipeline, shared.exchange
        p_state = state_at_of_two(tile_count)
        exchange.p_pipeline.consumer_wait(p_state)
        self.rescale(operands.flat, exchange, p_state.stage, thread.lane)
        cute.nvgpu.warpgroup.fence()
        second = pipeline.v.skip(state, 2)
        for half, v in enumerate((state, second)):
            own, acc = opaque(v.stage), operands.accs[half]
            for step in cutlass.range_constexpr(TILE_N // K16):
                a, b = operands.v[None, None, step, own], operands.p[None, None, step, p_state.stage]
                cute.gemm(operands.mma, acc, a, b, acc)
            cute.nvgpu.warpgroup.commit_group()
        cute.nvgpu.warpgroup.wait_group(1)
        self.kv.release(pipeline.v, state)
        cute.nvgpu.warpgroup.wait_group(0)
        self.kv.release(pipeline.v, second)
        exchange.p_pipeline.consumer_release(p_state)
        return pipeline.v.skip(second, 2)

    @cute.jit
    def write(
        self,
        operands: ValueOperands,
        results: Results,
        shared: MlaShared,
        work: WorkTileInfo,
        group,
        coord: Coord,
    ):
        flat, thread = operands.flat, coord.thread
        for c in cutlass.range_constexpr(self.columns):
            inverse = shared.exchange.inverse[self.head_of(c, thread.lane)]
            for j in cutlass.range_constexpr(8):
                flat[self.element(c, j)] *= inverse
        if work.split_idx >= 0:
            self.store_partial(flat, results.out_partial, work.split_idx, coord)
        else:
            sequence, query = divmod(work.batch_idx, group)
            self.store(flat, results.out, sequence, query, shared.staging, coord)

    @cute.jit
    def store_partial(self, flat, out_partial, split_idx, coord: Coord):
        thread, lane = coord.thread, opaque(coord.thread.lane)
        for c in cutlass.range_constexpr(self.columns):
            row = coord.first_head + self.head_of(c, lane)
            if row < coord.heads:
                target = out_partial[split_idx, 0, row, None]
                for j in cutlass.range_constexpr(8):
                    channel = (
                        thread.side * (HEAD_DIM_V // 2) + j // 2 * K_CHUNK + thread.warp * 16 + j % 2 * 8 + (lane >> 2)
                    )
                    target[channel] = flat[self.element(c, j)]

    @cute.jit
    def store(self, flat, out, sequence, query, staging: cute.Pointer, coord: Coord):
        """Store the warp's part of O^T as rows of O. The warp transposes O^T through its staging memory of `head_tile`
        x 16 elements."""
        thread, lane = coord.thread, opaque(coord.thread.lane)
        own = staging + (thread.side * 4 + thread.warp) * (self.head_tile * 16)
        vector = cute.make_rmem_tensor((8,), self.dtype)
        for product in cutlass.range_constexpr(4):
            for n in cutlass.range_constexpr(self.head_tile // 16):
                # Four matrices of 8 channels x 8 heads. Matrix i has half i % 2 of the 16 channels and half i / 2 of
                # the 16 heads.
                words = []
                for i in cutlass.range_constexpr(4):
                    column, j = 4 * n + i // 2 * 2, 2 * product + i % 2
                    words.append(pack(flat[self.element(column, j)], flat[self.element(column + 1, j)], self.dtype))
                head = 16 * n + (lane >> 4) * 8 + (lane & 7)
                store_transposed(Int32((own + (head * 16 + (lane & 8))).toint()), words)
            cute.arch.sync_warp()
            channel = thread.side * (HEAD_DIM_V // 2) + product * K_CHUNK + thread.warp * 16 + (lane & 1) * 8
            for n in cutlass.range_constexpr(self.head_tile // 16):
                head = 16 * n + (lane >> 1)
                cute.autovec_copy(cute.make_tensor(own + (head * 16 + (lane & 1) * 8), cute.make_layout(8)), vector)
                if coord.first_head + head < coord.heads:
                    target = out[sequence, query, coord.first_head + head, None]
                    cute.autovec_copy(vector, cute.local_tile(target, (8,), (channel // 8,)))
            cute.arch.sync_warp()


@cached
def compile_sparse_mla_swap_ab(dtype: str, head_dim: int, head_tile: int, lists: int, with_max_logits: bool):
    """Compile f, see `SparseMlaKernel`, for h <= head_tile, which is 16 or 32; max_logits is None unless
    with_max_logits."""
    kind = cute_dtype(dtype)
    return compile_sm90(
        SparseMlaSwapAbSm90(kind, head_dim, head_tile, with_max_logits),
        *fake_arguments(kind, head_dim, lists, lambda: fake_cache(kind, head_dim), with_max_logits),
    )


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Return every (compile function, arguments) that the ops can ask for."""
    return [
        (compile_sparse_mla_swap_ab, (dtype, head_dim, head_tile, lists, with_max_logits))
        for head_dim in SPARSE_HEAD_DIMS
        for head_tile in SWAP_AB_HEADS
        for dtype in DTYPES
        for lists, with_max_logits in ((1, False), (2, False), (1, True))
    ]
