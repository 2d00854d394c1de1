"""The r-th largest of the numbers that a CTA's threads hold in registers, by counting digits in shared memory.

A number is kept as its order (selection_list.py); a register that holds none is LOWEST. What lies between a lower bound
of the orders and the largest is divided into up to 2048 digits, all as wide; a scan from the largest finds the digit of
the r-th, whose orders are divided next, until they are few, or one. Orders have 32 bits, so three times do for any.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from dsa.cute.reductions import block_exclusive_scan
from dsa.cute.sm90 import WARP
from dsa.kernels.indexer.candidate_entries import load_entry
from dsa.kernels.indexer.candidate_lists import CAPACITY
from dsa.kernels.indexer.selection_list import LOWEST, order_of

LOG_DIGITS = 11
DIGITS = 1 << LOG_DIGITS
VECTOR = 4  # counts that are read at a time
BATCH = 4  # of a thread's numbers, which are passed over together where there are none


class Found(NamedTuple):
    """The orders from `low` on, 1 << shift of them, are of one digit, which `inside` of the numbers have; the one that
    is looked for is the `rank`-th largest of these."""

    low: Int32
    shift: Int32
    rank: Int32
    inside: Int32


@dataclass(frozen=True)
class RankMemory:
    """Shared memory: counts [DIGITS, and a little that nobody reads] and sums [2, 32], both zero before a search and
    behind it; largest [32], of warps; found [3]."""

    counts: cute.Tensor
    sums: cute.Tensor
    largest: cute.Tensor
    found: cute.Tensor

    @staticmethod
    def allocate(smem) -> "RankMemory":
        return RankMemory(
            smem.allocate_tensor(Int32, cute.make_layout(DIGITS + VECTOR), 16),
            smem.allocate_tensor(Int32, cute.make_layout((2, WARP), stride=(WARP, 1)), 16),
            smem.allocate_tensor(Int32, cute.make_layout(WARP), 16),
            smem.allocate_tensor(Int32, cute.make_layout(VECTOR), 16),
        )

    @cute.jit
    def clear(self, tid, threads: cutlass.Constexpr):
        zero = cute.make_rmem_tensor((VECTOR,), Int32)
        zero.fill(0)
        for i in cutlass.range_constexpr(DIGITS // VECTOR // threads):
            cute.autovec_copy(zero, cute.local_tile(self.counts, (VECTOR,), (tid + i * threads,)))
        if tid < 2 * WARP:
            self.sums[tid // WARP, tid % WARP] = Int32(0)

    @cute.jit
    def find(
        self,
        orders: cute.Tensor,
        count: Int32,
        low: Int32,
        rank: Int32,
        slack: Int32,
        few: cutlass.Constexpr,
        tid,
        threads: cutlass.Constexpr,
    ) -> Found:
        """A digit that has the rank-th largest of all orders (1: the largest), or `low` where there are fewer: of no
        more than rank + slack numbers with what is above it, or of no more than `few`, or of one order.

        orders  of each thread, of which the i-th is number i * threads + tid or, of VECTOR at a time, another of those
                below (i + VECTOR) * threads; those from `count` on are none
        low     -inf's order or more, and at most that of any number
        `clear` may come right before; begins and ends with a barrier
        """
        span, digit, inside = self.span(orders, count, low, tid, threads), Int32(0), Int32(0)
        shift = cutlass.max(32 - LOG_DIGITS - Int32(cute.arch.clz(span)), 0)
        searching = Int32(1)
        while searching > 0:
            # What is no number, or has another digit of those before, is further from `low` than `span`.
            last = span >> Uint32(shift)
            for base in cutlass.range_constexpr(0, cute.size(orders), BATCH):
                if base * threads < count:
                    for i in cutlass.range_constexpr(base, base + BATCH):
                        above = (Uint32(orders[i]) - Uint32(low)) >> Uint32(shift)
                        at = Int32(above) if above <= last else Int32(DIGITS)
                        cute.arch.inline_ptx(
                            "red.shared::cta.add.u32 [{$r0}], 1;",
                            read_only_args=[Int32(self.counts.iterator.toint()) + 4 * at],
                        )
            digit, rank, inside = self.digit_of(rank, tid, threads)
            low += digit << shift
            if inside - rank <= slack or inside <= few or shift == 0:
                searching = Int32(0)
            else:
                span = (Uint32(1) << Uint32(shift)) - 1
                shift = cutlass.max(shift - LOG_DIGITS, 0)
        return Found(low, shift, rank, inside)

    @cute.jit
    def span(self, orders: cute.Tensor, count: Int32, low: Int32, tid, threads: cutlass.Constexpr) -> Uint32:
        """How far from `low` the largest order is. Ends behind a barrier."""
        largest = low
        for base in cutlass.range_constexpr(0, cute.size(orders), BATCH):
            if base * threads < count:
                for i in cutlass.range_constexpr(base, base + BATCH):
                    largest = cutlass.max(largest, orders[i])
        largest = cute.arch.warp_redux_sync(largest, "max")
        lane = tid % WARP
        if lane == 0:
            self.largest[tid // WARP] = largest
        cute.arch.sync_threads()
        largest = self.largest[cutlass.min(lane, threads // WARP - 1)]
        return Uint32(cute.arch.warp_redux_sync(largest, "max")) - Uint32(low)

    @cute.jit
    def digit_of(self, rank: Int32, tid, threads: cutlass.Constexpr):
        """(the digit of the number of this rank, its rank within the digit, how many have this digit); if there are
        fewer numbers, the lowest digit as if its least had this rank. Zeroes the counts."""
        own = DIGITS // threads
        vectors = own // VECTOR
        first = DIGITS - own * (tid + 1)
        # Neighbours that read 32 bytes each begin with different halves, or they would meet in the same banks.
        turn = (tid >> 2) & (vectors - 1)
        mine = cute.make_rmem_tensor((VECTOR, vectors), Int32)
        total = Int32(0)
        cute.arch.sync_threads()
        for i in cutlass.range_constexpr(vectors):
            part = cute.local_tile(self.counts, (VECTOR,), (first // VECTOR + (i ^ turn),))
            cute.autovec_copy(part, mine[None, i])
            for j in cutlass.range_constexpr(VECTOR):
                total += mine[j, i]
        above, counted = block_exclusive_scan(total, self.sums[0, None], tid % WARP, tid // WARP)
        if above < rank and rank <= above + total:
            for i in cutlass.range_constexpr(own):
                at = first + own - 1 - i
                here = self.counts[at]
                if above < rank and rank <= above + here:
                    self.found[0], self.found[1], self.found[2] = at, rank - above, here
                above += here
        mine.fill(0)
        for i in cutlass.range_constexpr(vectors):
            cute.autovec_copy(mine[None, i], cute.local_tile(self.counts, (VECTOR,), (first // VECTOR + i,)))
        cute.arch.sync_threads()
        digit, inside = Int32(0), rank
        if counted >= rank:
            digit, rank, inside = self.found[0], self.found[1], self.found[2]
        return digit, rank, inside


@cute.jit
def load_candidates(
    entries: cute.Tensor,
    query,
    front: Int32,
    count: Int32,
    first_key: Int32,
    orders: cute.Tensor,
    own_keys: cute.Tensor,
    tid,
    threads: cutlass.Constexpr,
):
    """A query's list of `count`, `front` of them from the front, into the registers of a CTA: orders of the scores,
    LOWEST where there is none, and keys counted from the first."""
    for base in cutlass.range_constexpr(0, cute.size(orders), BATCH):
        for i in cutlass.range_constexpr(base, base + BATCH):
            orders[i], own_keys[i] = Int32(LOWEST), Int32(0)
        if base * threads < count:
            scores = cute.make_rmem_tensor((BATCH,), Float32)
            for i in cutlass.range_constexpr(BATCH):  # without a branch in between
                place = cutlass.min(tid + (base + i) * threads, count - 1)
                at = place if place < front else CAPACITY - 1 - (place - front)
                scores[i], own_keys[base + i] = load_entry(entries, query, at)
            for i in cutlass.range_constexpr(BATCH):
                own_keys[base + i] -= first_key
                if tid + (base + i) * threads < count:
                    orders[base + i] = order_of(scores[i])
