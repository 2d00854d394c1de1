"""The r-th largest of the numbers that a CTA's threads hold in registers, by counting digits in shared memory.

A number is kept as its order (selection_list.py); a register that holds none is LOWEST. What lies between a lower bound
of the orders and the largest is divided into up to 2048 digits, all as wide; a scan from the largest finds the digit of
the r-th, whose orders are divided next, until they are few, or one. Orders have 32 bits, so three times do for any.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from dsa.cute.sm90 import WARP
from dsa.kernels.indexer.candidate_lists import BATCH
from dsa.kernels.indexer.radix_select import BINS, SelectMemory, find_digit

LOG_DIGITS = 11
assert BINS == 1 << LOG_DIGITS


class RankFound(NamedTuple):
    """The orders from `low` on, 1 << shift of them, are of one digit, which `inside` of the numbers have; the one that
    is looked for is the `rank`-th largest of these."""

    low: Int32
    shift: Int32
    rank: Int32
    inside: Int32


@dataclass(frozen=True)
class RankMemory:
    """Shared memory: digits, whose counts are zero before a search and behind it; largest [32], of warps."""

    digits: SelectMemory
    largest: cute.Tensor

    @staticmethod
    def allocate(smem) -> "RankMemory":
        return RankMemory(SelectMemory.allocate(smem), smem.allocate_tensor(Int32, cute.make_layout(WARP), 16))

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
    ) -> RankFound:
        """A digit that has the rank-th largest of all orders (1: the largest), or `low` where there are fewer: of no
        more than rank + slack numbers with what is above it, or of no more than `few`, or of one order.

        orders  of each thread, LOWEST where it holds no number: of a batch from register b on, none of the warp's if
                `count` is at most b * threads
        low     -inf's order or more, and at most that of any number
        rank    at least 1
        `digits.clear` may come right before; begins and ends with a barrier
        """
        assert cute.size(orders) % BATCH == 0
        span, inside = self.span(orders, count, low, tid, threads), Int32(0)
        shift = cutlass.max(32 - LOG_DIGITS - Int32(cute.arch.clz(span)), 0)
        searching = Int32(1)
        while searching > 0:
            # What has another digit of those before is further from `low` than `span`; so is what is no number, by 2^23
            # or more, where a digit is 2^21 orders at most.
            last = span >> Uint32(shift)
            for base in cutlass.range_constexpr(0, cute.size(orders), BATCH):
                if base * threads < count:
                    for i in cutlass.range_constexpr(base, base + BATCH):
                        above = (Uint32(orders[i]) - Uint32(low)) >> Uint32(shift)
                        at = Int32(above) if above <= last else Int32(BINS)
                        cute.arch.inline_ptx(
                            "red.shared::cta.add.u32 [{$r0}], 1;",
                            read_only_args=[Int32(self.digits.counts.iterator.toint()) + 4 * at],
                        )
            digit, higher, here, enough = find_digit(rank, Int32(BINS - 1), self.digits, tid, threads, False)
            inside = rank
            if enough:
                low, rank, inside = low + (Int32(digit) << shift), higher, here
            if inside - rank <= slack or inside <= few or shift == 0:
                searching = Int32(0)
            else:
                span = (Uint32(1) << Uint32(shift)) - 1
                shift = cutlass.max(shift - LOG_DIGITS, 0)
        return RankFound(low, shift, rank, inside)

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
