"""Sparse MLA attention over selected 16-bit latent keys, for prefill and decoding.

o[t, h] = sum_j softmax_j(scale * q[t, h] . k[j]) k[j, :512]

The sum runs over the selected keys j of query t, which are in one or two lists. q and k have 576 or 512 channels.

Work, warp roles, scheduler, launch: sparse_mla_kernel.py, with one score warpgroup and 64 heads per CTA.
Consumers: mla_attention.py.
Producer: the load warpgroup gathers keys by cp.async, 16 bytes per lane. It loads a tile's indices while it requests
the keys of the previous tile (topk_gather.py). For an invalid index it writes zeros and clears the key's bit in the
valid mask, so that the key's scores become -inf. Q comes through the same stages, as one tile before the keys of each
work tile. So the load warps can load the next work tile's Q and keys before the current work tile is done.
Shared memory: the chunks of Q that are not in registers, two stages of P, a ring of 16 KiB v chunks and, for 576
channels, a ring of 8 KiB rope parts. The rings have room for about two and a half tiles of keys.
Constraints: limits.py; rows of q and keys start at multiples of 16 bytes.
Roofline: wgmma takes 2176 cycles per tile of 576 channels, and 2048 for 512. The L2 cache takes about 1700 to
3000 cycles to deliver a tile, 72 KiB, to every SM, depending on how much of it comes from DRAM.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from dsa.cute.fake_tensors import cute_dtype
from dsa.cute.shared_memory import load_matrices, swizzled
from dsa.cute.sm90 import WARPGROUP
from dsa.kernels.mla.limits import DTYPES, HEAD_DIM, HEAD_DIM_V, SPARSE_HEAD_DIMS, TILE_M, TILE_N
from dsa.kernels.mla.mla_attention import Q_RMEM_CHUNKS, REGISTERS, MlaAttention, NamedBarrier, TiledMmas
from dsa.kernels.mla.mla_epilogue import Epilogue
from dsa.kernels.mla.mla_roles import MlaShared, QTile, Results, WorkTileInfo
from dsa.kernels.mla.mla_softmax import SoftmaxState
from dsa.kernels.mla.mla_tiles import K16, K_CHUNK, K_PER_V, MASK_WORDS, ROPE_CHUNK, KvState
from dsa.kernels.mla.sparse_mla_kernel import Coord, SparseMlaKernel, fake_arguments, fake_cache
from dsa.kernels.mla.topk_gather import TopkGather
from dsa.runtime.compile_cache import cached, compile_sm90

V_STAGES = {HEAD_DIM: 10, HEAD_DIM_V: 11}
ROPE_STAGES = 2


@dataclass(frozen=True)
class SparseQTile(QTile):
    """The rows of a query: row i is head i. queries: number of queries per sequence, as a divisor."""

    queries: cute.FastDivmodDivisorV2

    @cute.jit
    def coord(self, query, row):
        return *divmod(query, self.queries), row


class SparseMlaSm90(MlaAttention, SparseMlaKernel):
    """Sparse MLA over keys of `head_dim` channels, 576 or 512, in `epilogue.dtype`."""

    q_in_ring = True

    def __init__(self, head_dim: int, epilogue: Epilogue):
        MlaAttention.__init__(self, self.stages(epilogue.dtype, head_dim), head_dim, epilogue)
        SparseMlaKernel.__init__(self, self.kv, self.exchange_memory, TILE_M, 1, REGISTERS)

    def stages(self, dtype: type[cutlass.Numeric], head_dim: int) -> TopkGather:
        """Return the rings of keys with their loads; a subclass can override this."""
        return TopkGather(dtype, head_dim, V_STAGES[head_dim], ROPE_STAGES)

    def q_tile(self, results: Results, group, coord: Coord) -> QTile:
        """Return the rows that this CTA computes; a subclass can override this."""
        return SparseQTile(coord.heads, coord.first_head, 0, group)

    @cute.jit
    def score(self, q, results: Results, shared: MlaShared, mmas: TiledMmas, group, scale, coord: Coord):
        q_tile = self.q_tile(results, group, coord)
        self.score_mainloop(q, results, mmas, shared, q_tile, scale, coord.tid, coord.warp, coord.lane)

    @cute.jit
    def output(self, results: Results, shared: MlaShared, mmas: TiledMmas, group, coord: Coord):
        self.output_mainloop(
            *(results, mmas.pv, shared, self.q_tile(results, group, coord)),
            *(coord.tid % WARPGROUP, coord.warp % 4, coord.lane, coord.warp // 4 - 1),
        )

    @cute.jit
    def load_q(self, shared: MlaShared, q_rmem, state: KvState, warp, lane) -> KvState:
        """Copy Q from the key stages, into which the load warps have gathered it like a tile of keys. The first
        Q_RMEM_CHUNKS k chunks go to registers, the others to the memory of Q.
        """
        pipeline = shared.pipeline
        words = cute.make_tensor(
            cute.recast_ptr(q_rmem.iterator, dtype=Uint32), cute.make_layout((4, K_CHUNK // K16, Q_RMEM_CHUNKS))
        )
        target = cute.recast_ptr(shared.q.iterator, cute.make_swizzle(0, 4, 3), dtype=self.dtype)
        vector = cute.make_rmem_tensor((8,), self.dtype)
        for n, chunk in enumerate(self.order):
            if const_expr(n == Q_RMEM_CHUNKS):
                # Before Q in shared memory is overwritten, all warps must be done with the previous work tile's Q: PTX
                # does not say which rows a warp of the warpgroup reads for a wgmma. No other barrier makes a warp wait
                # until the other warps have scored the last tile of the previous work tile.
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
                column = i // 4 % 2 * 8 + lane % 4 * 2 + i % 2  # index among 16 keys
                if (mask[i // 8] >> column) & 1 == 0:
                    scores[i] = -cutlass.Float32(float("inf"))


@cached
def compile_sparse_mla(dtype: str, head_dim: int, lists: int, with_max_logits: bool):
    """Compile f, see `SparseMlaKernel`, for any number of heads; max_logits is None unless with_max_logits."""
    kind = cute_dtype(dtype)
    return compile_sm90(
        SparseMlaSm90(head_dim, Epilogue(kind, with_max_logits)),
        *fake_arguments(kind, head_dim, lists, lambda: fake_cache(kind, head_dim), with_max_logits),
    )


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Return every (compile function, arguments) that the ops can ask for."""
    return [
        (compile_sparse_mla, (dtype, head_dim, lists, with_max_logits))
        for head_dim in SPARSE_HEAD_DIMS
        for dtype in DTYPES
        for lists, with_max_logits in ((1, False), (2, False), (1, True))
    ]
