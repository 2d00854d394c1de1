"""Find the r-th largest of the numbers in a CTA's registers by counting digits in shared memory.

A number is kept as its order, an integer that sorts like the number (selection_list.py). An empty register holds
LOWEST. The range from a lower bound to the largest order is divided into up to 2048 digits of equal width. A scan from
the largest digit finds the digit of the r-th number. That digit's orders are divided next, until the digit holds few
numbers or is a single order. Orders have 32 bits, so three passes are enough for any input.
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
    """A digit: the orders [low, low + (1 << shift)). `inside` of the numbers have it. The number that is looked for is
    the `rank`-th largest of these."""

    low: Int32
    shift: Int32
    rank: Int32
    inside: Int32


@dataclass(frozen=True)
class RankMemory:
    """Shared memory. digits: the digit counts, zero before and after a search. largest [32]: each warp's largest
    order."""

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
        """Find a digit that holds the rank-th largest of all orders (1: the largest). If there are fewer numbers, the
        result begins at `low`.

        The search ends at a digit in one of three cases. The digit and all higher ones hold at most rank + slack
        numbers; or the digit holds at most `few` numbers; or the digit is a single order.

        orders  per thread, LOWEST where it holds no number. If `count` is at most b * threads, this warp's registers
                from b on hold no number; b is the first register of a batch
        low     at least the order of -inf, and at most the order of any number
        rank    at least 1
        The caller may call `digits.clear` right before. Begins and ends with a barrier.
        """
        assert cute.size(orders) % BATCH == 0
        span, inside = self.span(orders, count, low, tid, threads), Int32(0)
        shift = cutlass.max(32 - LOG_DIGITS - Int32(cute.arch.clz(span)), 0)
        searching = Int32(1)
        while searching > 0:
            # Unsigned, an order outside the current range is further from `low` than `span`, and goes to bin BINS. So
            # does an empty register: it is at least 2^23 beyond `span`, and a digit has at most 2^21 orders.
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
        """Distance of the largest order from `low`. Contains a barrier."""
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
