"""Groups of neighbouring queries with few heads, computed together over the union of their selected keys.

The TILE_M rows of a group are its queries, one after the other. An entry of a group's list is a key and its
members: one bit for each query of the group that has selected the key. An entry is above 0, so 0 marks no
entry.

There are two queues of work: one of groups, and one of single queries that share too few keys.
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
    """The first counts[place] of `items` are to be computed, in any order.

    counts  [2]: of groups, then of single queries
    place   which of the two this queue is
    """

    items: cute.Tensor
    counts: cute.Tensor
    place: cutlass.Constexpr[int]

    @cute.jit
    def add(self, first, count):
        """Append the numbers first to first + count - 1; called by one thread."""
        place = cute.arch.atomic_add(self.counts.iterator + self.place, Int32(count), sem="relaxed", scope="gpu")
        for i in cutlass.range(count, unroll=1):
            self.items[place + i] = first + i


@dataclass(frozen=True)
class QueueScheduler:
    """The work of worker `worker` of `workers` in a queue: items worker, worker + workers and so on, never
    split.

    A state's `query` is an item and its `wave` a position in the queue. queries: an exclusive upper bound of
    the items.
    """

    worker: Int32
    workers: Int32
    queries: Int32
    items: cute.Tensor
    count: Int32

    @cute.jit
    def at(self, place: Int32) -> SchedulerState:
        """Return the state at a position of the queue."""
        is_valid, item = place < self.count, Int32(0)
        if is_valid:
            item = self.items[place]
        return SchedulerState(item, place, Int32(0), Int32(0), is_valid)

    @cute.jit
    def first(self) -> SchedulerState:
        return self.at(self.worker)

    def locate(self, state: SchedulerState):
        """Return (item, its first tile)."""
        return state.query, Int32(0)

    @cute.jit
    def advance(self, state: SchedulerState, query, tile, query_tiles):
        """As `StreamKScheduler.advance`, with all tiles of the item and no split."""
        return Int32(0), query_tiles, Int32(-1), self.at(state.wave + self.workers)


@dataclass(frozen=True)
class GroupRows:
    """The rows of a group: `size` queries with TILE_M / size rows each. A query's row i is its head i."""

    size: cutlass.Constexpr[int]

    @property
    def each(self) -> int:
        """Rows per query."""
        return TILE_M // self.size

    def member(self, row):
        """Return the index, in the group, of a row's query."""
        return row // self.each

    def head(self, row):
        return row % self.each


@cute.jit
def entry_key(entry: Int32) -> Int32:
    return entry & ((1 << MEMBER_SHIFT) - 1)


@cute.jit
def entry_members(entry: Int32) -> Uint32:
    return Uint32(entry) >> MEMBER_SHIFT
