"""Sparse MLA attention over selected 16-bit latent keys with up to 32 heads, with swap A/B.

o[t, h] = softmax_j(scale * q[t, h] . k[j]) k[j, :512]

The sum runs over the selected keys j of query t. q and k have 576 or 512 channels. The kernel serves prefill
and decoding.

This is sparse_mla_sm90.py with swap A/B: S^T = K Q^T and O^T += V^T P^T. Keys and channels are M of the
wgmmas, heads are N (swap_ab_scores.py, swap_ab_values.py). The wgmmas of 16 heads take a quarter of the time
of 64 heads.
Work, scheduler, launch: sparse_mla_kernel.py; a CTA has all heads of a query.
Warp roles: two score warpgroups, which take the tiles in turns, two output warpgroups, and a load warpgroup
(topk_gather.py).
Shared memory: Q, two stages of P^T, a ring of 16 KiB v chunks and a ring of rope parts, which hold two to
three tiles.
Constraints: limits.py; rows of q and keys start at multiples of 16 bytes.
Roofline: shared memory. Per tile of 576 channels it receives 72 KiB and delivers 136 KiB of keys and, for 16
heads, 32 KiB of Q and P to the wgmmas: 1920 cycles. The L2 cache takes 1850 cycles to deliver a tile to every
SM (measured with plain loads).
"""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute

from dsa.cute.fake_tensors import cute_dtype
from dsa.kernels.mla.limits import DTYPES, HEAD_DIM, HEAD_DIM_V, SPARSE_HEAD_DIMS, SWAP_AB_HEADS
from dsa.kernels.mla.mla_attention import MlaShared, RoleRegisters
from dsa.kernels.mla.mla_epilogue import Results
from dsa.kernels.mla.sparse_mla_kernel import Coord, SparseMlaKernel, fake_arguments, fake_cache
from dsa.kernels.mla.swap_ab_exchange import HeadRange, SwapAbExchangeMemory, Thread
from dsa.kernels.mla.swap_ab_scores import SCORE_WARPGROUPS, SwapAbScores
from dsa.kernels.mla.swap_ab_values import SwapAbValues
from dsa.kernels.mla.topk_gather import TopkGather
from dsa.runtime.compile_cache import cached, compile_sm90

V_STAGES = {(HEAD_DIM, 16): 11, (HEAD_DIM, 32): 9, (HEAD_DIM_V, 16): 12, (HEAD_DIM_V, 32): 10}
ROPE_STAGES = 2
REGISTERS = RoleRegisters(96, 112, 64)


class SparseMlaSwapAbSm90(SparseMlaKernel):
    """Sparse MLA over keys of `head_dim` channels, with `head_tile` heads, 16 or 32, per CTA.

    with_max_logits: also write the maximum logits.
    """

    all_heads = True

    def __init__(self, dtype: type[cutlass.Numeric], head_dim: int, head_tile: int, with_max_logits: bool):
        kv = TopkGather(dtype, head_dim, V_STAGES[head_dim, head_tile], ROPE_STAGES)
        exchange_memory = SwapAbExchangeMemory(dtype, head_dim, head_tile, SCORE_WARPGROUPS)
        super().__init__(kv, exchange_memory, head_tile, SCORE_WARPGROUPS, REGISTERS)
        self.scores, self.values = SwapAbScores(kv, head_tile, with_max_logits), SwapAbValues(kv, head_tile)

    def operand_storage(self) -> type:
        @cute.struct
        class OperandStorage:
            staging: cute.struct.Align[cute.struct.MemRange[self.kv.dtype, 8 * 16 * self.head_tile], 128]
            kv: self.kv.tensor_storage()

        return OperandStorage

    def tiled_mmas(self) -> tuple[cute.TiledMma, cute.TiledMma]:
        return self.scores.tiled_mmas(), self.values.tiled_mma()

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
        heads = HeadRange(coord.first_head, coord.heads)
        self.scores.score_mainloop(results, mmas[0], shared, heads, group, scale, coord.thread)

    @cute.jit
    def output(self, results: Results, shared: MlaShared, mmas, group, coord: Coord):
        heads = HeadRange(coord.first_head, coord.heads)
        self.values.output_mainloop(results, mmas[1], shared, heads, group, coord.thread)


@cached
def compile_sparse_mla_swap_ab(dtype: str, head_dim: int, head_tile: int, lists: int, with_max_logits: bool):
    """Compile f, see `SparseMlaKernel`, for h <= head_tile, 16 or 32; max_logits is None unless with_max_logits."""
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
