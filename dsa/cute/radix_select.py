"""Exact selection of the r largest of a list in shared memory, by counting digits.

The list's fp32 values become integers in the order of the floats; their distance u from the largest is narrowed to the
r-th smallest, 11 bits at a time from the first bit that differs: count the digits of those still in question, scan,
take the digit that holds the r-th. Once 32 or fewer are in question, a warp orders them. Equal values are told apart
by their columns in the same way, so that of equal ones the lowest column is taken.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from dsa.cute.block_scan import before_and_all

DIGIT = 11
BINS = 1 << DIGIT
FEW = 32
LAST_COLUMN = 2**31 - 1


@dataclass(frozen=True)
class SelectMemory:
    """Shared memory of a selection: counts [BINS], found [4], sums [2, 32], zero at first; few [2, FEW]."""

    counts: cute.Tensor
    found: cute.Tensor
    sums: cute.Tensor
    few: cute.Tensor

    @staticmethod
    def allocate(smem) -> "SelectMemory":
        return SelectMemory(
            smem.allocate_tensor(Int32, cute.make_layout(BINS), 16),
            smem.allocate_tensor(Int32, cute.make_layout(4), 16),
            smem.allocate_tensor(Int32, cute.make_layout((2, 32), stride=(32, 1)), 16),
            smem.allocate_tensor(Int32, cute.make_layout((2, FEW), stride=(FEW, 1)), 16),
        )


@cute.jit
def ordered(bits: Int32) -> Int32:
    """An fp32 number's bits as an integer in the order of the numbers; -0.0 and 0.0 are one."""
    value = cute.arch.inline_ptx(
        "add.f32 {$w0}, {$r0}, 0f00000000;", write_only_types=[Int32], read_only_args=[bits]
    )
    return value ^ ((value >> 31) & 0x7FFFFFFF)


@cute.jit
def bits_of(key: Int32) -> Int32:
    """The inverse of `ordered`."""
    return key ^ ((key >> 31) & 0x7FFFFFFF)


@cute.jit
def is_selected(key: Int32, column: Int32, top: Int32, bound: Uint32, last: Int32):
    """Whether a list's entry is among those that `select_largest` found."""
    u = Uint32(top) - Uint32(key)
    return u < bound or (u == bound and column <= last)


@cute.jit
def _extremes(keys: cute.Tensor, count: Int32, memory: SelectMemory, tid, threads: cutlass.Constexpr):
    """Turn the list's values into ordered integers. -> the largest, the smallest."""
    lane, warp = tid % 32, tid // 32
    top, least = Int32(-(2**31)), Int32(2**31 - 1)
    for i in cutlass.range(tid, count, threads, unroll=4):
        key = ordered(keys[i])
        keys[i] = key
        top, least = cutlass.max(top, key), cutlass.min(least, key)
    top = cute.arch.warp_redux_sync(top, "max")
    least = cute.arch.warp_redux_sync(least, "min")
    if lane == 0:
        memory.sums[0, warp] = top
        memory.sums[1, warp] = least
    cute.arch.sync_threads()
    top, least = memory.sums[0, lane % (threads // 32)], memory.sums[1, lane % (threads // 32)]
    return cute.arch.warp_redux_sync(top, "max"), cute.arch.warp_redux_sync(least, "min")


@cute.jit
def _find(rank: Int32, memory: SelectMemory, tid, threads: cutlass.Constexpr):
    """The digit of the rank-th entry counted, its rank among those of this digit, their number. Zeroes the counts."""
    own = BINS // threads
    counts = cute.local_tile(memory.counts, (own,), (tid,))
    mine = cute.make_rmem_tensor((own,), Int32)
    cute.autovec_copy(counts, mine)
    total = Int32(0)
    for j in cutlass.range_constexpr(own):
        total += mine[j]
    before, _ = before_and_all(total, memory.sums[0, None], tid % 32, tid // 32)
    if before < rank and rank <= before + total:
        for j in cutlass.range_constexpr(own):
            if before < rank and rank <= before + mine[j]:
                memory.found[0] = tid * own + j
                memory.found[1] = rank - before
                memory.found[2] = mine[j]
            before += mine[j]
    mine.fill(0)
    cute.autovec_copy(mine, counts)
    cute.arch.sync_threads()
    return Uint32(memory.found[0]), memory.found[1], memory.found[2]


@cute.jit
def select_largest(
    keys: cute.Tensor,
    columns: cute.Tensor,
    count: Int32,
    need: Int32,
    slack: Int32,
    memory: SelectMemory,
    tid,
    threads: cutlass.Constexpr,
):
    """-> (top, bound, last) for `is_selected`, which then holds for `need` entries of the list, or for all of them if
    there are no more, or for up to `slack` more where that saves work.

    keys     [capacity] Int32, the bits of fp32 numbers without NaN; left as ordered integers
    columns  [capacity] Int32, not negative, each once
    count    entries of the list; a barrier must lie behind their stores, and another before they change
    """
    top, least = _extremes(keys, count, memory, tid, threads)
    rank, inside = need, count
    left = 32 - Int32(cute.arch.clz(Uint32(top) - Uint32(least)))  # bits in which they differ
    if count <= need:
        left = Int32(32)
    prefix = Uint32(0)
    column_left, column_prefix = Int32(31), Uint32(0)

    while left > 0 and inside > rank + slack and inside > FEW:
        shift = cutlass.max(left - DIGIT, 0)
        first = prefix << Uint32(left - shift)
        bins = Uint32(1) << Uint32(left - shift)
        for i in cutlass.range(tid, count, threads, unroll=4):
            digit = ((Uint32(top) - Uint32(keys[i])) >> Uint32(shift)) - first
            if digit < bins:
                cute.arch.atomic_add(memory.counts.iterator + Int32(digit), Int32(1), scope="cta")
        cute.arch.sync_threads()
        digit, rank, inside = _find(rank, memory, tid, threads)
        prefix = first + digit
        left = shift

    while left == 0 and column_left > 0 and inside > rank + slack and inside > FEW:
        shift = cutlass.max(column_left - DIGIT, 0)
        first = column_prefix << Uint32(column_left - shift)
        bins = Uint32(1) << Uint32(column_left - shift)
        for i in cutlass.range(tid, count, threads, unroll=4):
            digit = (Uint32(columns[i]) >> Uint32(shift)) - first
            if digit < bins and Uint32(top) - Uint32(keys[i]) == prefix:
                cute.arch.atomic_add(memory.counts.iterator + Int32(digit), Int32(1), scope="cta")
        cute.arch.sync_threads()
        digit, rank, inside = _find(rank, memory, tid, threads)
        column_prefix = first + digit
        column_left = shift

    bound = Uint32(top) - Uint32(least)
    if left < 32:
        bound = cutlass.min(bound, ((prefix + 1) << Uint32(left)) - 1)
    last = Int32(((column_prefix + 1) << Uint32(column_left)) - 1)
    if inside > rank + slack:  # FEW or fewer: order them
        half = Uint32(left // 2)
        rest = Uint32(left) - half
        for i in cutlass.range(tid, count, threads, unroll=4):
            u, column = Uint32(top) - Uint32(keys[i]), columns[i]
            if (u >> half) >> rest == prefix and Uint32(column) >> Uint32(column_left) == column_prefix:
                slot = cute.arch.atomic_add(memory.found.iterator + 3, Int32(1), scope="cta")
                memory.few[0, slot] = Int32(u)
                memory.few[1, slot] = column
        cute.arch.sync_threads()
        lane = tid % 32
        own, own_column = Uint32(memory.few[0, lane]), memory.few[1, lane]
        place = Int32(0)
        for j in cutlass.range(inside, unroll=2):
            other = Uint32(memory.few[0, j])
            if other < own or (other == own and memory.few[1, j] < own_column):
                place += 1
        it = lane < inside and place == rank - 1
        bound = Uint32(cute.arch.warp_redux_sync(own if it else Uint32(0), "max"))
        last = cute.arch.warp_redux_sync(own_column if it else Int32(0), "max")
        if tid == 0:
            memory.found[3] = 0
    return top, bound, last
