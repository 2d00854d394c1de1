"""What warpgroups tell each other in shared memory where heads are columns: S^T = K Q^T, O^T = V^T P^T."""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint32, const_expr
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from dsa.kernels.mla.fp8_kv_scale_table import TABLE_BYTES
from dsa.kernels.mla.mla_tiles import TILE

P_SLOTS = 2
ADDERS = 8  # warps that accumulate


def turn(count: Int32):
    """(slot, phase) of a ring of two after so many turns: one number to keep instead of two."""
    return count & 1, (count >> 1) & 1


@dataclass(frozen=True)
class Thread:
    """Which warpgroup of its role, warp of four, lane; and so the thread."""

    side: Int32
    warp: Int32
    lane: Int32

    @property
    def tid(self) -> Int32:
        return self.warp * 32 + self.lane


@dataclass(frozen=True)
class Exchange:
    """Pointers are to barriers; p_full, p_empty: of each slot.

    queries    Q [heads, channels]
    p          P^T [heads, 64 keys, P_SLOTS]
    factors    [heads, P_SLOTS]: what the columns of O^T are to be multiplied by before a tile, if changed [P_SLOTS] is
               not 0
    inverses   [heads]: what O^T is to be multiplied by at the end; end_full, end_empty
    turns      barriers: each scoring warpgroup's turn to look at the maxima and change them
    columns    [heads, scoring warps]: their columns' maxima, or sums
    tops       [heads]: what P is relative to, in powers of two (NOTHING while there is nothing)
    totals     [4, scoring threads, heads / 16]: of each, the sums of its columns over its keys

    Of FP8 caches also:
    half_queries  the memory of Q as f16
    tables     address of P_SLOTS tables of the keys' scales, see scale_table.py
    largest    [scoring warps]: the largest magnitude of their part of Q, as bits of bf16
    """

    queries: cute.Tensor
    p: cute.Tensor
    p_full: cute.Pointer
    p_empty: cute.Pointer
    factors: cute.Tensor
    changed: cute.Tensor
    inverses: cute.Tensor
    end_full: cute.Pointer
    end_empty: cute.Pointer
    turns: cute.Pointer
    columns: cute.Tensor
    tops: cute.Tensor
    totals: cute.Tensor
    half_queries: cute.Tensor | None = None
    tables: Int32 | None = None
    largest: cute.Tensor | None = None


class ExchangeMemory:
    """The shared memory of it, for `rows` heads of a query of `channels` numbers and so many scoring warpgroups.

    dtype  of Q and P; None: an FP8 cache, with Q in bf16 and f16, and P in f16
    """

    def __init__(self, dtype: type[cutlass.Numeric] | None, channels: int, rows: int, scorers: int):
        self.of_bytes = dtype is None
        self.dtype, self.p_dtype = dtype or BFloat16, dtype or Float16
        self.channels, self.rows, self.scorers = channels, rows, scorers
        self.of_lanes = (4, 128 * scorers, rows // 16)

    def layouts(self) -> tuple[cute.ComposedLayout, cute.ComposedLayout]:
        """Of Q and P^T, as operands of the products."""
        return (
            sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (TILE, self.rows, self.channels), self.dtype, 1),
            sm90.make_smem_layout_b(LayoutEnum.COL_MAJOR, (TILE, self.rows, TILE), self.p_dtype, P_SLOTS),
        )

    def storage(self) -> type:
        table_bytes = TABLE_BYTES * P_SLOTS if self.of_bytes else 16

        @cute.struct
        class ExchangeStorage:
            p_full: cute.struct.MemRange[Int64, P_SLOTS]
            p_empty: cute.struct.MemRange[Int64, P_SLOTS]
            end_full: cute.struct.MemRange[Int64, 1]
            end_empty: cute.struct.MemRange[Int64, 1]
            turns: cute.struct.MemRange[Int64, 2]
            changed: cute.struct.MemRange[Int32, P_SLOTS]
            factors: cute.struct.MemRange[Float32, self.rows * P_SLOTS]
            inverses: cute.struct.MemRange[Float32, self.rows]
            columns: cute.struct.MemRange[Float32, 4 * self.scorers * self.rows]
            tops: cute.struct.MemRange[Float32, self.rows]
            largest: cute.struct.MemRange[Uint32, 4 * self.scorers]
            totals: cute.struct.Align[cute.struct.MemRange[Float32, 32 * self.scorers * self.rows], 16]
            tables: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, table_bytes], 16]
            p: cute.struct.Align[cute.struct.MemRange[self.p_dtype, self.rows * TILE * P_SLOTS], 1024]
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, self.rows * self.channels], 1024]

        return ExchangeStorage

    @cute.jit
    def exchange(self, storage, q_layout: cute.ComposedLayout, p_layout: cute.ComposedLayout):
        exchange = Exchange(
            storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner),
            storage.p.get_tensor(p_layout.outer, swizzle=p_layout.inner),
            storage.p_full.data_ptr(),
            storage.p_empty.data_ptr(),
            storage.factors.get_tensor(cute.make_layout((self.rows, P_SLOTS))),
            storage.changed.get_tensor(cute.make_layout(P_SLOTS)),
            storage.inverses.get_tensor(cute.make_layout(self.rows)),
            storage.end_full.data_ptr(),
            storage.end_empty.data_ptr(),
            storage.turns.data_ptr(),
            storage.columns.get_tensor(cute.make_layout((self.rows, 4 * self.scorers))),
            storage.tops.get_tensor(cute.make_layout(self.rows)),
            storage.totals.get_tensor(cute.make_layout(self.of_lanes, stride=(1, 4, 512 * self.scorers))),
        )
        if const_expr(self.of_bytes):
            exchange = replace(
                exchange,
                half_queries=storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner, dtype=Float16),
                tables=Int32(storage.tables.data_ptr().toint()),
                largest=storage.largest.get_tensor(cute.make_layout(4 * self.scorers)),
            )
        return exchange

    @cute.jit
    def init(self, exchange: Exchange):
        """Barriers. One thread's work. A tile has one scoring warpgroup."""
        for i in cutlass.range_constexpr(P_SLOTS):
            cute.arch.mbarrier_init(exchange.p_full + i, 4)
            cute.arch.mbarrier_init(exchange.p_empty + i, ADDERS)
            cute.arch.mbarrier_init(exchange.turns + i, 4)
            exchange.changed[i] = 0
        cute.arch.mbarrier_init(exchange.end_full, 4)
        cute.arch.mbarrier_init(exchange.end_empty, ADDERS)
