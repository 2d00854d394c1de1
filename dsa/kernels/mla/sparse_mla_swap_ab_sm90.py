"""Sparse MLA attention over selected latent keys in 16 bits, few heads: prefill and decoding with up to 32 heads.

o[t, h] = softmax_j(scale * q[t, h] . k[j]) k[j, :512] over the keys j of query t; q and k of 576 or 512 channels

As sparse_mla_sm90.py, but with A and B swapped: heads are the columns of the products, and keys and channels their rows
(swap_ab_scores.py, swap_ab_values.py): 16 heads take a quarter of the products' time of 64.
Work, launch: sparse_mla_kernel.py; a CTA has all heads of a query.
Warp roles: two score warpgroups, which take the tiles in turns, two output warpgroups, a load warpgroup
(topk_gather.py).
Shared memory: Q, two stages of P^T, a ring of v chunks of 16 KiB and one of rope parts: two to three tiles.
Constraints: limits.py; rows of q and keys start at multiples of 16 bytes.
Roofline: of a tile of 576 channels shared memory takes in 72 KiB and gives 136 to the products, with 32 of Q and P for
16 heads: 1920 clocks. The L2 cache delivers a tile to every multiprocessor in 1850 (measured by plain loads).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute

from dsa.cute.fake_tensors import cute_dtype
from dsa.kernels.mla.limits import DTYPES, HEAD_DIM, HEAD_DIM_V, SPARSE_HEAD_DIMS, SWAP_AB_HEADS
from dsa.kernels.mla.mla_attention import RoleRegisters
from dsa.kernels.mla.mla_epilogue import Results
from dsa.kernels.mla.mla_tiles import KvPipeline, KvTensors
from dsa.kernels.mla.sparse_arguments import fake_arguments, fake_cache
from dsa.kernels.mla.sparse_mla_kernel import Coord, SparseMlaKernel
from dsa.kernels.mla.swap_ab_exchange import HeadRange, SwapAbExchange, SwapAbExchangeMemory, Thread
from dsa.kernels.mla.swap_ab_scores import SCORE_WARPGROUPS, SwapAbScores
from dsa.kernels.mla.swap_ab_values import SwapAbValues
from dsa.kernels.mla.topk_gather import TopkGather
from dsa.runtime.compile_cache import cached, compile_sm90

V_STAGES = {(HEAD_DIM, 16): 11, (HEAD_DIM, 32): 9, (HEAD_DIM_V, 16): 12, (HEAD_DIM_V, 32): 10}
ROPE_STAGES = 2
REGISTERS = RoleRegisters(96, 112, 64)


@dataclass(frozen=True)
class Operands:
    """The products, and the layouts of Q, of P^T, of the v chunks and of the rope parts."""

    qk: cute.TiledMma
    pv: cute.TiledMma
    q_layout: cute.ComposedLayout
    p_layout: cute.ComposedLayout
    v_layout: cute.ComposedLayout
    rope_layout: cute.ComposedLayout


@dataclass(frozen=True)
class Shared:
    """staging: 16 x head_tile numbers for each output warp."""

    pipeline: KvPipeline
    exchange: SwapAbExchange
    kv: KvTensors
    staging: cute.Pointer


class SparseMlaSwapAbSm90(SparseMlaKernel):
    """Keys of `head_dim` channels; `head_tile` heads, 16 or 32; with_max_logits: write them, too."""

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

    def operands(self) -> Operands:
        return Operands(
            *(self.scores.tiled_mma(), self.values.tiled_mma()),
            *self.exchange_memory.layouts(),
            *(self.kv.v_layout(), self.kv.rope_layout()),
        )

    def shared(self, storage, operands: Operands) -> Shared:
        return Shared(
            self.kv.pipeline(storage.pipeline),
            self.exchange_memory.exchange(storage.exchange, operands.q_layout, operands.p_layout),
            self.kv.tensors(storage.operands.kv, operands.v_layout, operands.rope_layout),
            storage.operands.staging.data_ptr(),
        )

    def thread(self, warp, lane) -> Thread:
        return Thread(warp // 4 % SCORE_WARPGROUPS, warp % 4, lane)

    @cute.jit
    def score(self, q, results: Results, shared: Shared, operands: Operands, group, scale, coord: Coord):
        self.scores.score_mainloop(
            *(results, operands.qk, shared.kv, shared.pipeline, shared.exchange),
            *(HeadRange(coord.first_head, coord.heads), group, scale, coord.thread),
        )

    @cute.jit
    def output(self, results: Results, shared: Shared, operands: Operands, group, coord: Coord):
        self.values.output_mainloop(
            *(results, operands.pv, shared.kv.v, shared.pipeline, shared.exchange, shared.staging),
            *(HeadRange(coord.first_head, coord.heads), group, coord.thread),
        )


@cached
def compile_sparse_mla_swap_ab(dtype: str, head_dim: int, head_tile: int, lists: int, with_max_logits: bool):
    """-> f, see `SparseMlaKernel`, for h <= head_tile, 16 or 32; max_logits: None unless with_max_logits."""
    kind = cute_dtype(dtype)
    return compile_sm90(
        SparseMlaSwapAbSm90(kind, head_dim, head_tile, with_max_logits),
        *fake_arguments(kind, head_dim, lists, lambda: fake_cache(kind, head_dim), with_max_logits),
    )


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Every compile function and its arguments that the ops can ask for."""
    return [
        (compile_sparse_mla_swap_ab, (dtype, head_dim, head_tile, lists, with_max_logits))
        for head_dim in SPARSE_HEAD_DIMS
        for head_tile in SWAP_AB_HEADS
        for dtype in DTYPES
        for lists, with_max_logits in ((1, False), (2, False), (1, True))
    ]
