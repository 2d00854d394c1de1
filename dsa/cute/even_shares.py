"""How CTAs divide items of equal length among them: in turns as long as there are many, then in even shares."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32


@dataclass(frozen=True)
class Shares:
    """All items' steps are a line, `count` an item. Workers take items in turns, neighbours at one time; from place
    `even` on, one or two turns before the end, each has one share, of `share` steps or one more. An item that is cut
    belongs to the worker that has its first steps, at the end of its share; others have theirs at the beginning of
    their shares. step: from an item's end to the beginning of the worker's next one, in turns."""

    count: cute.FastDivmodDivisorV2
    even: Int32
    step: Int32
    share: Int32
    rest: Int32

    @cute.jit
    def begin(self, worker):
        """Where a worker's share begins, and the share of the one before ends."""
        return self.even + worker * self.share + cutlass.min(worker, self.rest)

    @cute.jit
    def first(self, worker):
        """Where its work begins."""
        place = worker * self.count.divisor
        return place if place < self.even else self.begin(worker)

    @cute.jit
    def here(self, worker, place):
        """How many of an item's steps are left at a place, and of the worker's."""
        return cutlass.min(self.count.divisor - place % self.count, self.begin(worker + 1) - place)

    @cute.jit
    def following(self, worker, place):
        """Where a worker goes on behind an item, or its part of one, that ends at `place`."""
        if place <= self.even:
            place += self.step
            if place >= self.even:
                place = self.begin(worker)
        return place

    @cute.jit
    def begins_late(self, worker, place):
        """Whether a worker's part of the item that it leaves at `place` lacks the first steps."""
        begin = self.begin(worker)
        return begin < place and (place - 1) // self.count * self.count.divisor < begin


@cute.jit
def shares_of(items: Int32, count: cute.FastDivmodDivisorV2, workers: Int32) -> Shares:
    turns = cutlass.max(items // workers - 1, 0)
    left = (items - turns * workers) * count.divisor
    return Shares(
        count, turns * workers * count.divisor, (workers - 1) * count.divisor, left // workers, left % workers
    )
