"""Groups of neighbouring queries of few heads, which are attended to together: TILE_M rows, of a group's queries one
after the other, over the union of the keys that they select.

An entry of a group's list is a key and its members, a bit for each query of the group that has selected it: above 0,
so 0 is no entry. Two queues say who computes what: of groups, and of the queries whose selections share too little.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from dsa.kernels.mla.limits import TILE_M
from dsa.kernels.mla.query_group_limits import MEMBER_SHIFT
from dsa.kernels.mla.tile_scheduler import SchedulerState


@dataclass(frozen=True)
class Queue:
    """The first count[place] of `items` are to be computed, in any order. counts [2]: of groups, then of queries."""

    items: cute.Tensor
    counts: cute.Tensor
    place: cutlass.Constexpr[int]

    @cute.jit
    def add(self, first, count):
        """The numbers from `first` on. One thread's work."""
        place = cute.arch.atomic_add(self.counts.iterator + self.place, Int32(count), sem="relaxed", scope="gpu")
        for i in cutlass.range(count, unroll=1):
            self.items[place + i] = first + i


@dataclass(frozen=True)
class QueueScheduler:
    """What worker number `worker` of `workers` does of a queue: items worker, worker + workers and so on, each whole.
    A state's `query` is an item, its `wave` the place in the queue. queries: more than all items."""

    worker: Int32
    workers: Int32
    queries: Int32
    items: cute.Tensor
    count: Int32

    @cute.jit
    def at(self, place: Int32) -> SchedulerState:
        is_valid, item = place < self.count, Int32(0)
        if is_valid:
            item = self.items[place]
        return SchedulerState(item, place, Int32(0), Int32(0), is_valid)

    @cute.jit
    def first(self) -> SchedulerState:
        return self.at(self.worker)

    def locate(self, state: SchedulerState):
        """(item, its first tile)."""
        return state.query, Int32(0)

    @cute.jit
    def advance(self, state: SchedulerState, query, tile, query_tiles):
        """As `StreamKScheduler.advance`: all tiles, no split."""
        return Int32(0), query_tiles, Int32(-1), self.at(state.wave + self.workers)


@dataclass(frozen=True)
class GroupRows:
    """The rows of a group: `size` queries of TILE_M / size rows each, of which the first `heads` are heads."""

    size: cutlass.Constexpr[int]

    @property
    def each(self) -> int:
        """Rows of a query."""
        return TILE_M // self.size

    def member(self, row):
        """The query of the group that a row is of."""
        return row // self.each

    def head(self, row):
        return row % self.each


@cute.jit
def entry_key(entry: Int32) -> Int32:
    return entry & ((1 << MEMBER_SHIFT) - 1)


@cute.jit
def entry_members(entry: Int32) -> Uint32:
    return Uint32(entry) >> MEMBER_SHIFT
