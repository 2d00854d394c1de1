"""What the warpgroups of attention over an FP8 cache tell each other, in shared memory."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint32
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from dsa.cute.latent_tiles import TILE, VALUE
from dsa.cute.shared_bytes import load_4, load_8

P_SLOTS = 2
ADDERS = 8  # warps that accumulate
TABLE_BYTES = 1024
ROOM = 6  # f16 has room for e4m3 times 2^7: the largest scale of a key is below 2 after division by its power


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

    queries    Q [heads, channels] in bf16, and the same memory in f16
    p          P^T [heads, 64 keys, P_SLOTS], f16
    tables     address of P_SLOTS tables of the keys' scales, see `ScaleTable`
    factors    [heads, P_SLOTS]: what the columns of O^T are to be multiplied by before a tile, if changed [P_SLOTS] is
               not 0
    inverses   [heads]: what O^T is to be multiplied by at the end; end_full, end_empty
    turns      barriers: each scoring warpgroup's turn to look at the maxima and change them
    columns    [heads, scoring warps]: their columns' maxima, or sums
    tops       [heads]: what P is relative to, in powers of two (NOTHING while there is nothing)
    totals     [4, scoring threads, heads / 16]: of each, the sums of its columns over its keys
    largest    [scoring warps]: the largest magnitude of their part of Q, as bits of bf16
    """

    queries: cute.Tensor
    half_queries: cute.Tensor
    p: cute.Tensor
    p_full: cute.Pointer
    p_empty: cute.Pointer
    tables: Int32
    factors: cute.Tensor
    changed: cute.Tensor
    inverses: cute.Tensor
    end_full: cute.Pointer
    end_empty: cute.Pointer
    turns: cute.Pointer
    columns: cute.Tensor
    tops: cute.Tensor
    totals: cute.Tensor
    largest: cute.Tensor


class ScaleTable:
    """What the numbers of a tile's keys are multiplied by for V, which is f16: their scales divided by 2^(e - ROOM),
    e the exponent of the key's largest, so that the products use f16's range; P has the key's 2^e. Two keys are side
    by side, as the products' operands have them.

    d = 576: [4 groups, 32 pairs of keys, 2, 2 keys] f16: the scale rounded, and what the rounding left out.
    d = 512: [8 blocks, 32 pairs, 2 keys] f16, of powers of two; of the last block, which is bf16, 2^(ROOM - e) as bf16.
    So a group whose scale is below 2^-20 of the key's largest loses accuracy: up to 2^-22 of that largest scale.
    """

    def __init__(self, channels: int):
        self.split = channels > VALUE
        self.entry = 8 if self.split else 4
        self.each = TILE // 2 * self.entry

    def place(self, table: Int32, group, key):
        """Where the scale of a key for a group, or block, is; 4 bytes further, what the rounding left out."""
        return table + group * self.each + key // 2 * self.entry + key % 2 * 2

    def of_block(self, table: Int32, block) -> Int32:
        """Where the scales for a block of 64 channels begin."""
        return table + (block // 2 if self.split else block) * self.each

    def pair(self, start: Int32, pair) -> list:
        """Words of the two keys' scales: what was rounded, and what that left out if it did."""
        if self.split:
            return list(load_8(start + pair * self.entry))
        return [load_4(start + pair * self.entry)]


class ExchangeMemory:
    """The shared memory of it, for `rows` heads of a query of `channels` numbers and so many scoring warpgroups."""

    def __init__(self, channels: int, rows: int, scorers: int):
        self.channels, self.rows, self.scorers = channels, rows, scorers
        self.of_lanes = (4, 128 * scorers, rows // 16)

    def layouts(self) -> tuple[cute.ComposedLayout, cute.ComposedLayout]:
        """Of Q and P^T, as operands of the products."""
        return (
            sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (TILE, self.rows, self.channels), BFloat16, 1),
            sm90.make_smem_layout_b(LayoutEnum.COL_MAJOR, (TILE, self.rows, TILE), Float16, P_SLOTS),
        )

    def storage(self) -> type:
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
            tables: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, TABLE_BYTES * P_SLOTS], 16]
            p: cute.struct.Align[cute.struct.MemRange[Float16, self.rows * TILE * P_SLOTS], 1024]
            q: cute.struct.Align[cute.struct.MemRange[BFloat16, self.rows * self.channels], 1024]

        return ExchangeStorage

    @cute.jit
    def exchange(self, storage, q_layout: cute.ComposedLayout, p_layout: cute.ComposedLayout):
        return Exchange(
            storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner),
            storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner, dtype=Float16),
            storage.p.get_tensor(p_layout.outer, swizzle=p_layout.inner),
            storage.p_full.data_ptr(),
            storage.p_empty.data_ptr(),
            Int32(storage.tables.data_ptr().toint()),
            storage.factors.get_tensor(cute.make_layout((self.rows, P_SLOTS))),
            storage.changed.get_tensor(cute.make_layout(P_SLOTS)),
            storage.inverses.get_tensor(cute.make_layout(self.rows)),
            storage.end_full.data_ptr(),
            storage.end_empty.data_ptr(),
            storage.turns.data_ptr(),
            storage.columns.get_tensor(cute.make_layout((self.rows, 4 * self.scorers))),
            storage.tops.get_tensor(cute.make_layout(self.rows)),
            storage.totals.get_tensor(cute.make_layout(self.of_lanes, stride=(1, 4, 512 * self.scorers))),
            storage.largest.get_tensor(cute.make_layout(4 * self.scorers)),
        )

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
