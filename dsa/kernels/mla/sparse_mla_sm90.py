"""Sparse MLA attention over selected latent keys in 16 bits, for prefill and decoding: every query has its own list of
keys, or two.

o[t, h] = softmax_j(scale * q[t, h] . k[j]) k[j, :512] over the keys j of query t; q and k of 576 or 512 channels

Work, warp roles, launch: sparse_mla_kernel.py; one score warpgroup, 64 heads a CTA. The consumers: mla_attention.py.
Producer: the load warpgroup gathers 16 bytes a lane by cp.async, a tile's indices while the tile before is asked for
(topk_gather.py). Where there is no key it writes zeros, and says so by a bit; such a score is minus infinity. A query's
own rows come by the same rings, as a tile before its keys: loads do not wait for the end of a query.
Shared memory: the chunks of Q that are not in registers, two stages of P, a ring of v chunks of 16 KiB and one of rope
parts: two and a half tiles.
Constraints: limits.py; rows of q and keys start at multiples of 16 bytes.
Roofline: of a tile of 576 channels wgmma takes 2176 clocks, of 512 2048. The L2 cache delivers a tile, 72 KiB to every
multiprocessor, in about 1700 to 3000 clocks, depending on how much of it comes from memory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from dsa.cute.fake_tensors import cute_dtype
from dsa.cute.shared_memory import load_matrices, swizzled
from dsa.cute.sm90 import WARPGROUP
from dsa.kernels.mla.limits import DTYPES, HEAD_DIM, HEAD_DIM_V, SPARSE_HEAD_DIMS, TILE_M, TILE_N
from dsa.kernels.mla.mla_attention import Q_RMEM_CHUNKS, REGISTERS, MlaAttention, MlaOperands, MlaShared, NamedBarrier
from dsa.kernels.mla.mla_epilogue import Epilogue, QTile, Results
from dsa.kernels.mla.mla_softmax import SoftmaxState
from dsa.kernels.mla.mla_tiles import K16, K_CHUNK, K_PER_V, MASK_WORDS, ROPE_CHUNK, KvState
from dsa.kernels.mla.sparse_arguments import fake_arguments, fake_cache
from dsa.kernels.mla.sparse_mla_kernel import Coord, SparseMlaKernel
from dsa.kernels.mla.tile_scheduler import WorkTileInfo
from dsa.kernels.mla.topk_gather import TopkGather
from dsa.runtime.compile_cache import cached, compile_sm90

V_STAGES = {HEAD_DIM: 10, HEAD_DIM_V: 11}
ROPE_STAGES = 2


@dataclass(frozen=True)
class SparseQTile:
    """Heads first_row to first_row + TILE_M - 1 of the `rows` of a query; queries: of a sequence, to divide by."""

    queries: cute.FastDivmodDivisorV2
    rows: Int32
    first_row: Int32
    kv_head: ClassVar[int] = 0

    @cute.jit
    def coord(self, query, row):
        """(sequence, query of the sequence, head) of a row, in the results."""
        return *divmod(query, self.queries), row

    def has_row(self, _, row):
        """Whether a work tile has the row."""
        return row < self.rows


class SparseMlaAttention(MlaAttention):
    """Queries that come by the rings, and keys by the bits of the valid mask."""

    q_in_ring = True

    @cute.jit
    def load_q(self, shared: MlaShared, q_rmem, state: KvState, warp, lane) -> KvState:
        """They came as a tile of keys does, row by row."""
        pipeline = shared.pipeline
        words = cute.make_tensor(
            cute.recast_ptr(q_rmem.iterator, dtype=Uint32), cute.make_layout((4, K_CHUNK // K16, Q_RMEM_CHUNKS))
        )
        target = cute.recast_ptr(shared.q.iterator, cute.make_swizzle(0, 4, 3), dtype=self.dtype)
        vector = cute.make_rmem_tensor((8,), self.dtype)
        for n, chunk in enumerate(self.order):
            if const_expr(n == Q_RMEM_CHUNKS):
                # All warps have multiplied with the rows before: PTX does not say which rows a warp's part of a wgmma
                # reads, and nothing else makes a warp wait for the other warps' last tile of the query before.
                cute.arch.barrier(barrier_id=NamedBarrier.SCORE, number_of_threads=WARPGROUP)
            stages, place = shared.kv.v, state.v.stage * K_PER_V + chunk % K_PER_V
            if const_expr(chunk < ROPE_CHUNK):
                pipeline.v.consumer_wait(state.v, chunk % K_PER_V)
            else:
                pipeline.rope.consumer_wait(state.rope)
                stages, place = shared.kv.rope, state.rope.stage
            source = cute.recast_ptr(stages.iterator, cute.make_swizzle(0, 4, 3), dtype=self.dtype)
            source += place * (TILE_M * K_CHUNK)
            if const_expr(n < Q_RMEM_CHUNKS):
                for step in cutlass.range_constexpr(K_CHUNK // K16):
                    address = source + swizzled(warp * 16 + lane % 16, 2 * step + lane // 16)
                    for i, word in enumerate(load_matrices(Int32(address.toint()))):
                        words[i, step, n] = word
            else:
                for i in cutlass.range_constexpr(TILE_M * K_CHUNK // (8 * WARPGROUP)):
                    here = warp * (TILE_M * K_CHUNK // 32) + i * 32 + lane
                    cute.autovec_copy(cute.make_tensor(source + here * 8, cute.make_layout(8)), vector)
                    there = target + ((n - Q_RMEM_CHUNKS) * TILE_M * K_CHUNK + here * 8)
                    cute.autovec_copy(vector, cute.make_tensor(there, cute.make_layout(8)))
            if const_expr(chunk < ROPE_CHUNK and chunk % K_PER_V == K_PER_V - 1):
                cute.arch.sync_warp()
                self.kv.release(pipeline.v, state.v)
                state = pipeline.advance_v(state)
        self.kv.release(pipeline.rope, state.rope)
        return pipeline.advance_rope(state)

    @cute.jit
    def apply_mask(
        self,
        scores,
        softmax: SoftmaxState,
        shared: MlaShared,
        state: KvState,
        work: WorkTileInfo,
        q_tile: SparseQTile,
        key,
        tid,
        lane,
    ):
        mask = cute.make_rmem_tensor((MASK_WORDS,), Uint32)
        cute.autovec_copy(shared.pipeline.valid_mask[None, state.rope.stage], mask)
        if mask[0] & mask[1] & mask[2] & mask[3] != 0xFFFF:
            for i in cutlass.range_constexpr(TILE_N // 2):
                column = i // 4 % 2 * 8 + lane % 4 * 2 + i % 2  # of 16
                if (mask[i // 8] >> column) & 1 == 0:
                    scores[i] = -cutlass.Float32(float("inf"))


class SparseMlaSm90(SparseMlaKernel):
    """Keys of `head_dim` channels, 576 or 512, in the dtype of the epilogue."""

    def __init__(self, head_dim: int, epilogue: Epilogue):
        self.attention = self.make_attention(head_dim, epilogue)
        super().__init__(self.attention.kv, self.attention.exchange_memory, TILE_M, 1, REGISTERS)

    def make_attention(self, head_dim: int, epilogue: Epilogue) -> SparseMlaAttention:
        """The consumers, with the keys' stages."""
        kv = TopkGather(epilogue.dtype, head_dim, V_STAGES[head_dim], ROPE_STAGES)
        return SparseMlaAttention(kv, head_dim, epilogue)

    def q_tile(self, results: Results, group, coord: Coord) -> QTile:
        """The CTA's rows."""
        return SparseQTile(group, coord.heads, coord.first_head)

    def operand_storage(self) -> type:
        return self.attention.operand_storage()

    def operands(self) -> MlaOperands:
        return self.attention.operands()

    def shared(self, storage, operands: MlaOperands) -> MlaShared:
        return self.attention.shared(storage, operands)

    @cute.jit
    def score(self, q, results: Results, shared: MlaShared, operands: MlaOperands, group, scale, coord: Coord):
        q_tile = self.q_tile(results, group, coord)
        self.attention.score_mainloop(
            q, results, operands.mmas, shared, q_tile, scale, coord.tid, coord.warp, coord.lane
        )

    @cute.jit
    def output(self, results: Results, shared: MlaShared, operands: MlaOperands, group, coord: Coord):
        q_tile = self.q_tile(results, group, coord)
        self.attention.output_mainloop(
            *(results, operands.mmas.pv, shared, q_tile),
            *(coord.tid % WARPGROUP, coord.warp % 4, coord.lane, coord.warp // 4 - 1),
        )


@cached
def compile_sparse_mla(dtype: str, head_dim: int, lists: int, with_max_logits: bool):
    """-> f, see `SparseMlaKernel`, for any number of heads; max_logits: None unless with_max_logits."""
    kind = cute_dtype(dtype)
    return compile_sm90(
        SparseMlaSm90(head_dim, Epilogue(kind, with_max_logits)),
        *fake_arguments(kind, head_dim, lists, lambda: fake_cache(kind, head_dim), with_max_logits),
    )


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Every compile function and its arguments that the ops can ask for."""
    return [
        (compile_sparse_mla, (dtype, head_dim, lists, with_max_logits))
        for head_dim in SPARSE_HEAD_DIMS
        for dtype in DTYPES
        for lists, with_max_logits in ((1, False), (2, False), (1, True))
    ]
