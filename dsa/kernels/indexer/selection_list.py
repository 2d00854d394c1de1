"""List of a query's best keys so far, in shared memory. One warp fills it, and cuts it to the k best when it is full.

A key's score is kept as its order, an integer that sorts like the score. Keys are appended in ascending order, and a
cut preserves that order. So among equal scores, the first in the list is the lowest key, which wins. Whatever the
scores are, the list ends up with exactly the k largest, those with the lowest keys among equal ones, sorted by key.

A cut finds the k-th largest order digit by digit. It divides the range from the least to the largest order into digits
of 8 bits, then the orders that share the k-th one's digit by 8 bits more, and so on. It ends when few enough entries
share the digit to keep them all, or when they are equal.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from dsa.cute.reductions import warp_inclusive_scan
from dsa.cute.sm90 import WARP

DIGIT_BITS = 8
DIGITS = 1 << DIGIT_BITS
LOWEST = -(2**31)  # order of NaN, below that of -inf
HIGHEST = 2**31 - 1
AHEAD = 4  # entries per lane that are read at a time


@dataclass(frozen=True)
class SelectionList:
    """Shared memory of one warp: orders and keys [capacity], counts [DIGITS + 4], of which only DIGITS are read."""

    orders: cute.Tensor
    keys: cute.Tensor
    counts: cute.Tensor

    @cute.jit
    def append(self, order: Int32, key: Int32, taken, count: Int32, lane: Int32) -> Int32:
        """Append the keys of the lanes whose `taken` is true, in lane order. -> the list's length."""
        mask = cute.arch.vote_ballot_sync(taken)
        if taken:
            at = count + cute.arch.popc(mask & ((1 << lane) - 1))
            self.orders[at] = order
            self.keys[at] = key
        return count + cute.arch.popc(mask)

    @cute.jit
    def cut(self, count: Int32, k: Int32, slack: Int32, lane: Int32):
        """Keep the k best of `count` > k entries and up to `slack` more. -> (number of entries, the order that a later
        key must exceed to be one of the k best)."""
        cute.arch.sync_warp()
        low, high = self.bounds(count, lane)
        shift = cutlass.max(32 - DIGIT_BITS - Int32(cute.arch.clz(Uint32(high) - Uint32(low))), 0)
        # Invariant: the k-th best entry has rank `rank` from the top among orders [low, low + (digits << shift)).
        rank, digits, excess = k, Int32(DIGITS), slack + 1
        while excess > slack and digits > 0:
            self.count_digits(count, low, shift, digits, lane)
            digit, above, inside = self.find(rank, lane)
            low += digit << shift
            rank -= above
            excess = inside - rank
            narrower = cutlass.max(shift - DIGIT_BITS, 0)
            digits = Int32(1) << (shift - narrower) if shift > 0 else Int32(0)
            if excess > slack:
                shift = narrower
        # Entries that share the last digit stay. If they are equal, only the first `rank` of them stay.
        equal = digits == 0
        count = self.keep(count, low, rank if equal else Int32(HIGHEST), lane)
        return count, low if equal else low - 1

    @cute.jit
    def bounds(self, count: Int32, lane: Int32):
        """(least order of the entries, largest order)"""
        least, largest = Int32(HIGHEST), Int32(LOWEST)
        for first in cutlass.range(0, count, WARP * AHEAD, unroll=1):
            for i in cutlass.range_constexpr(AHEAD):
                order = self.orders[cutlass.min(first + WARP * i + lane, count - 1)]
                least, largest = cutlass.min(least, order), cutlass.max(largest, order)
        return cute.arch.warp_redux_sync(least, "min"), cute.arch.warp_redux_sync(largest, "max")

    @cute.jit
    def count_digits(self, count: Int32, low: Int32, shift: Int32, digits: Int32, lane: Int32):
        """counts[d] = number of entries with orders in [low + (d << shift), low + (d + 1 << shift)), for d < digits."""
        zero = cute.make_rmem_tensor((4,), Int32)
        zero.fill(0)
        for i in cutlass.range_constexpr(DIGITS // 4 // WARP):
            cute.autovec_copy(zero, cute.local_tile(self.counts, (4,), (lane + WARP * i,)))
        cute.arch.sync_warp()
        order = cute.make_rmem_tensor((AHEAD,), Int32)
        for first in cutlass.range(0, count, WARP * AHEAD, unroll=1):
            # All loads come before the first atomic, because the compiler moves no load across one.
            for i in cutlass.range_constexpr(AHEAD):
                order[i] = self.orders[cutlass.min(first + WARP * i + lane, count - 1)]
            for i in cutlass.range_constexpr(AHEAD):
                at = first + WARP * i + lane
                above = (Uint32(order[i]) - Uint32(low)) >> Uint32(shift)
                # Orders without a digit and missing entries go to bin DIGITS, which is cheaper than a branch.
                digit = Int32(above) if at < count and above < Uint32(digits) else Int32(DIGITS)
                cute.arch.inline_ptx(
                    "red.shared::cta.add.u32 [{$r0}], 1;",
                    read_only_args=[Int32(self.counts.iterator.toint()) + 4 * digit],
                )
        cute.arch.sync_warp()

    @cute.jit
    def find(self, rank: Int32, lane: Int32):
        """(digit of the entry of this rank from the top, number of entries with higher digits, number with this
        digit)"""
        own = DIGITS // WARP
        mine = cute.make_rmem_tensor((own,), Int32)
        cute.autovec_copy(cute.local_tile(self.counts, (own,), (lane,)), mine)
        total = Int32(0)
        for i in cutlass.range_constexpr(own):
            total += mine[i]
        up_to = warp_inclusive_scan(total, lane)
        above = cute.arch.shuffle_sync(up_to, WARP - 1) - up_to
        digit, higher, inside = Int32(-1), Int32(-1), Int32(-1)
        for j in cutlass.range_constexpr(own):
            i = own - 1 - j
            if above < rank and rank <= above + mine[i]:
                digit, higher, inside = lane * own + i, above, mine[i]
            above += mine[i]
        # One lane has found it; the others have -1.
        digit = cute.arch.warp_redux_sync(digit, "max")
        return digit, cute.arch.warp_redux_sync(higher, "max"), cute.arch.warp_redux_sync(inside, "max")

    @cute.jit
    def keep(self, count: Int32, low: Int32, equals: Int32, lane: Int32) -> Int32:
        """Keep the entries above `low` and the first `equals` of those that equal it, in their order. -> number kept.

        In place: no write passes the reads, because all lanes read a round of entries before any lane writes."""
        kept, same = Int32(0), Int32(0)
        order, key = cute.make_rmem_tensor((AHEAD,), Int32), cute.make_rmem_tensor((AHEAD,), Int32)
        for first in cutlass.range(0, count, WARP * AHEAD, unroll=1):
            for i in cutlass.range_constexpr(AHEAD):
                at = cutlass.min(first + WARP * i + lane, count - 1)
                order[i], key[i] = self.orders[at], self.keys[at]
            cute.arch.sync_warp()
            for i in cutlass.range_constexpr(AHEAD):
                there = first + WARP * i + lane < count
                level = there and order[i] == low
                levels = cute.arch.vote_ballot_sync(level)
                earlier = same + cute.arch.popc(levels & ((1 << lane) - 1))
                stays = (there and order[i] > low) or (level and earlier < equals)
                kept = self.append(order[i], key[i], stays, kept, lane)
                same += cute.arch.popc(levels)
        cute.arch.sync_warp()
        return kept


@cute.jit
def order_of(x: Float32) -> Int32:
    """An integer that sorts like the numbers. Both zeros have the same order, and NaN has LOWEST."""
    bits = cute.arch.inline_ptx("add.f32 {$w0}, {$r0}, 0f00000000;", write_only_types=[Int32], read_only_args=[x])
    order = bits ^ ((bits >> 31) & HIGHEST)
    return order if x == x else Int32(LOWEST)


@cute.jit
def number_of(order: Int32) -> Float32:
    """The number that has this order."""
    bits = order ^ ((order >> 31) & HIGHEST)
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits])
