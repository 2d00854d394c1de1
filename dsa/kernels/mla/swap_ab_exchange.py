"""Shared memory through which score warpgroups pass P^T and factors of O^T to output warpgroups, with swap A/B.

Swap A/B computes S^T = K Q^T and O^T = V^T P^T. For FP8 caches the score warpgroups also pass factors of V, made from
the scales of a tile's keys.
"""

from dataclasses import dataclass
from enum import IntEnum

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint32
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from dsa.cute.pipeline import Mbarriers, Pipeline, pipeline_storage
from dsa.cute.shared_memory import load_4, load_8
from dsa.cute.sm90 import WARPGROUP
from dsa.kernels.mla.limits import HEAD_DIM_V, TILE_N

P_STAGES = 2
OUTPUT_WARPS = 8
SCALE_TABLE_BYTES = 1024
# A factor of a ScaleTable is scale / 2^e * 2^F16_ROOM, where e is the exponent of the key's largest scale. scale / 2^e
# is below 2, so an e4m3 value times its factor is at most 448 * 2^7. For a bf16 value (d = 512), e is at least the
# value's exponent - 9 (ScaleTable), so the value is below 2^(e + 10). Times the factor 2^(F16_ROOM - e) it is at most
# 65280. Both products fit in f16.
F16_ROOM = 6


class NamedBarrier(IntEnum):
    """Named barriers. SCORE is for all score warpgroups. SCORE_WARPGROUP + i and VOTE + i are for score warpgroup i."""

    SCORE = 1
    SCORE_WARPGROUP = 2
    VOTE = 4


@dataclass(frozen=True)
class SwapAbExchange:
    """Shared memory between the score and output warpgroups.

    q           Q [heads, channels] in 16 bits
    p           P^T [heads, TILE_N, P_STAGES] in 16 bits
    p_pipeline  pipeline of p
    rescale     [heads, P_STAGES] fp32: factor by which each column of O^T is multiplied before a tile's V^T P^T is
                added; only valid if the stage's `rescaled` is not 0
    rescaled    [P_STAGES] int32: 1 if the tile in this stage of P raised row_max, otherwise 0
    inverse     [heads] fp32: factor by which each column of O^T is multiplied at the end of a work tile: 1 / (sum of
                P), or 0 for a head without keys; times 2^-F16_ROOM for FP8 caches. The sum includes the attention sink,
                except in a split
    end         pipeline of inverse, one stage
    order       mbarriers, one per stage of P: let two score warpgroups read and update row_max in turns
    by_warp     [heads, score warps] fp32: scratch for reductions over warps: each warp's maximum or sum per head
    row_max     [heads] fp32: P = 2^(score - row_max); NO_MAX before the work tile's first tile
    row_sum     [4, score threads, heads / 16] fp32: each thread's partial sums of P, one for each of the thread's
                heads / 4 columns

    Only kernels for FP8 caches use these:
    q_f16         a view of q's memory as f16
    scale_tables  address of P_STAGES ScaleTables
    q_largest     [score warps] uint32: the largest magnitudes in even and in odd channels of a warp's part of Q, as two
                  bf16
    """

    q: cute.Tensor
    p: cute.Tensor
    p_pipeline: Pipeline
    rescale: cute.Tensor
    rescaled: cute.Tensor
    inverse: cute.Tensor
    end: Pipeline
    order: Mbarriers
    by_warp: cute.Tensor
    row_max: cute.Tensor
    row_sum: cute.Tensor
    q_f16: cute.Tensor
    scale_tables: Int32
    q_largest: cute.Tensor

    @cute.jit
    def init(self):
        """Initialize the barriers; called by one thread. The four warps of one score warpgroup write a tile of P^T."""
        self.p_pipeline.init(consumers=OUTPUT_WARPS, producers=4)
        self.order.init(4)
        self.end.init(consumers=OUTPUT_WARPS, producers=4)
        for i in cutlass.range_constexpr(P_STAGES):
            self.rescaled[i] = 0


class SwapAbExchangeMemory:
    """The layout of a SwapAbExchange in shared memory.

    dtype             dtype of Q and P. None for an FP8 cache: P is f16; Q is f16 in the channels where keys are e4m3,
                      and bf16 in the 64 channels where they are bf16
    head_dim          channels of a head's query
    head_tile         heads per CTA
    score_warpgroups  number of score warpgroups
    """

    def __init__(self, dtype: type[cutlass.Numeric] | None, head_dim: int, head_tile: int, score_warpgroups: int):
        self.fp8_kv = dtype is None
        self.dtype, self.p_dtype = dtype or BFloat16, dtype or Float16
        self.head_dim, self.head_tile, self.score_warpgroups = head_dim, head_tile, score_warpgroups

    def layouts(self) -> tuple[cute.ComposedLayout, cute.ComposedLayout]:
        return (
            sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (TILE_N, self.head_tile, self.head_dim), self.dtype, 1),
            sm90.make_smem_layout_b(LayoutEnum.COL_MAJOR, (TILE_N, self.head_tile, TILE_N), self.p_dtype, P_STAGES),
        )

    def storage(self) -> type:
        table_bytes = SCALE_TABLE_BYTES * P_STAGES if self.fp8_kv else 16

        @cute.struct
        class ExchangeStorage:
            p_pipeline: pipeline_storage(P_STAGES)
            end: pipeline_storage(1)
            order: cute.struct.MemRange[Int64, P_STAGES]
            rescaled: cute.struct.MemRange[Int32, P_STAGES]
            rescale: cute.struct.MemRange[Float32, self.head_tile * P_STAGES]
            inverse: cute.struct.MemRange[Float32, self.head_tile]
            by_warp: cute.struct.MemRange[Float32, 4 * self.score_warpgroups * self.head_tile]
            row_max: cute.struct.MemRange[Float32, self.head_tile]
            q_largest: cute.struct.MemRange[Uint32, 4 * self.score_warpgroups]
            row_sum: cute.struct.Align[cute.struct.MemRange[Float32, 32 * self.score_warpgroups * self.head_tile], 16]
            scale_tables: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, table_bytes], 16]
            p: cute.struct.Align[cute.struct.MemRange[self.p_dtype, self.head_tile * TILE_N * P_STAGES], 1024]
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, self.head_tile * self.head_dim], 1024]

        return ExchangeStorage

    @cute.jit
    def exchange(self, storage) -> SwapAbExchange:
        q_layout, p_layout = self.layouts()
        return SwapAbExchange(
            q=storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner),
            p=storage.p.get_tensor(p_layout.outer, swizzle=p_layout.inner),
            p_pipeline=Pipeline.of(storage.p_pipeline, P_STAGES),
            rescale=storage.rescale.get_tensor(cute.make_layout((self.head_tile, P_STAGES))),
            rescaled=storage.rescaled.get_tensor(cute.make_layout(P_STAGES)),
            inverse=storage.inverse.get_tensor(cute.make_layout(self.head_tile)),
            end=Pipeline.of(storage.end, 1),
            order=Mbarriers(storage.order.data_ptr(), P_STAGES),
            by_warp=storage.by_warp.get_tensor(cute.make_layout((self.head_tile, 4 * self.score_warpgroups))),
            row_max=storage.row_max.get_tensor(cute.make_layout(self.head_tile)),
            row_sum=storage.row_sum.get_tensor(
                cute.make_layout(
                    (4, WARPGROUP * self.score_warpgroups, self.head_tile // 16),
                    stride=(1, 4, 512 * self.score_warpgroups),
                )
            ),
            q_f16=storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner, dtype=Float16),
            scale_tables=Int32(storage.scale_tables.data_ptr().toint()),
            q_largest=storage.q_largest.get_tensor(cute.make_layout(4 * self.score_warpgroups)),
        )


class ScaleTable:
    """The factors that turn a tile's FP8 values into V in f16.

    A factor is a value's scale divided by 2^(e - F16_ROOM), where e is the exponent of the key's largest scale. For d =
    512, the key's largest bf16 value counts as a scale, too, with an exponent reduced by 9. (`share_scales` in
    fp8_kv_scores.py computes e and limits it.) So values times factors fit in f16. To make up for the division, the
    score warpgroups multiply P by the key's 2^e, and O is divided by 2^F16_ROOM. The factors of keys 2 i and 2 i + 1
    are adjacent, as are these keys in the wgmma operand of V^T.

    d = 576: [4 groups, 32 pairs of keys, 2, 2 keys] f16; a group is 128 channels. The third mode is (rounded factor,
    rounding error).
    d = 512: [8 blocks, 32 pairs of keys, 2 keys] f16, powers of two; a block is 64 channels. The values of the last
    block are bf16, and the block's factor 2^(F16_ROOM - e) is stored as bf16. Values whose scale is below 2^-20 of
    the key's largest scale lose accuracy, with an error up to 2^-22 of that largest scale.
    """

    def __init__(self, head_dim: int):
        self.split = head_dim > HEAD_DIM_V
        self.entry = 8 if self.split else 4
        self.each = TILE_N // 2 * self.entry

    def place(self, table: Int32, group, key):
        """Return the address of a key's factor for group (d = 576) or block (d = 512) `group`.

        For d = 576 the factor's rounding error is 4 bytes further.
        """
        return table + group * self.each + key // 2 * self.entry + key % 2 * 2

    def of_block(self, table: Int32, block) -> Int32:
        """Return the address of the first key's factor for channels 64 `block` to 64 `block` + 63."""
        return table + (block // 2 if self.split else block) * self.each

    def pair(self, start: Int32, pair) -> list:
        """Return a list: the word of the factors of two keys and, for d = 576, the word of the rounding errors of these
        factors. start: address of the group's or block's factors; pair: index of the pair of keys."""
        if self.split:
            return list(load_8(start + pair * self.entry))
        return [load_4(start + pair * self.entry)]
