"""The schedulers of sparse MLA attention: StreamKScheduler for all queries, QueueScheduler for the items of a queue.

There are two queues. The items of the first are groups of queries that share keys (sparse_mla_union_sm90.py). The items
of the second are single queries (sparse_mla_queued_sm90.py): queries that share too few keys with their group, and
queries of a group whose joint result is not finite.

A worker is a set of CTAs that compute the same queries, one CTA per head tile. If a CTA computes all heads, a worker is
one CTA.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32


class SchedulerState(NamedTuple):
    """Position of a worker: the next work tile.

    query     query of the next work tile; not valid at the worker's first work tile after the full waves
    wave      number of work tiles that the worker has done; below full_waves it is the index of the next wave
    tile      while wave <= full_waves: the worker's first split tile, counted over all split queries. Afterwards: the
              first tile of the next work tile, counted from the start of `query`
    left      number of split tiles that this worker has yet to compute
    is_valid  whether there is a next work tile
    """

    query: Int32
    wave: Int32
    tile: Int32
    left: Int32
    is_valid: cutlass.Boolean


@dataclass(frozen=True)
class StreamKScheduler:
    """The work of worker `worker` of `workers`: whole queries in full waves, then stream-K over the rest.

    A query has at most `tiles` tiles. In wave w of the `full_waves` waves a worker computes the whole query `worker` +
    w * `workers`. The remaining queries are the split queries, and their tiles are the split tiles. The split tiles are
    divided evenly among the first `split_workers` workers, as if every query had `tiles` tiles. Each of these workers
    gets a range of consecutive split tiles. `split_workers` is at most the number of split tiles.

    So several workers can share a split query. Of a worker's range, only the first and the last query can be shared, so
    a worker has at most two splits; the queries between them are whole work tiles. A split with the query's first tile
    writes partial result 2 * `worker` + 1. Any other split writes partial result 2 * `worker`.

    The KeyBlockScheduler of the training kernels differs: it has no full waves, and its units of work have unequal
    lengths.
    """

    worker: Int32
    workers: Int32
    full_waves: Int32
    queries: Int32
    tiles: Int32
    split_workers: Int32

    def first_split(self):
        return self.full_waves * self.workers

    def split_tiles(self):
        """Return the number of split tiles, as if every query had `tiles` tiles."""
        return (self.queries - self.full_waves * self.workers) * self.tiles

    @cute.jit
    def split_begin(self, worker: Int32):
        """Return the first of a worker's split tiles, counted over all split queries."""
        return cutlass.min(worker, self.split_workers) * self.split_tiles() // self.split_workers

    @cute.jit
    def worker_of(self, tile: Int32):
        """Return the worker that computes split tile `tile`, counted over all split queries."""
        return ((tile + 1) * self.split_workers - 1) // self.split_tiles()

    @cute.jit
    def first(self) -> SchedulerState:
        query, wave, tile, left = self.worker, Int32(0), Int32(0), Int32(0)
        if self.first_split() < self.queries:
            tile = self.split_begin(self.worker)
            left = self.split_begin(self.worker + 1) - tile
        return SchedulerState(query, wave, tile, left, (self.full_waves > 0 and query < self.queries) or left > 0)

    @cute.jit
    def locate(self, state: SchedulerState):
        """Return (query of the next work tile, first tile of the next work tile in this query)."""
        query, tile = state.query, state.tile
        if state.wave == self.full_waves:
            query, tile = self.first_split() + tile // self.tiles, tile % self.tiles
        return query, tile

    @cute.jit
    def advance(self, state: SchedulerState, query, tile, query_tiles):
        """Return (first tile, end tile, split_idx, next state) of the work tile at (query, tile), which `locate`
        returned.

        split_idx is -1 if the work tile is a whole query. query_tiles: number of tiles of the query, at most `tiles`.
        The `query` of the next state can be wrong if the full waves end here. Then it serves only to prefetch Q, and
        `locate` returns the right query.
        """
        first, end, split_idx, following = Int32(0), query_tiles, Int32(-1), query + self.workers
        wave, left = state.wave, state.left
        if wave >= self.full_waves:
            taken = cutlass.min(self.tiles - tile, left)
            first, end = cutlass.min(tile, query_tiles), cutlass.min(tile + taken, query_tiles)
            if taken < self.tiles:
                split_idx = 2 * self.worker
                if tile == 0:
                    split_idx += 1
            left -= taken
            tile, following = Int32(0), query + 1
        wave += 1
        is_valid = left > 0
        if wave < self.full_waves:
            is_valid = following < self.queries
        return first, end, split_idx, SchedulerState(following, wave, tile, left, is_valid)


@dataclass(frozen=True)
class Queue:
    """A queue of groups or of single queries to compute: the first counts[place] entries of `items`, in any order.

    items   [largest number of items] int32: indices of groups or of queries
    counts  [2] int32: number of queued groups, number of queued single queries
    place   index of this queue in `counts`: 0 for groups, 1 for single queries
    """

    items: cute.Tensor
    counts: cute.Tensor
    place: cutlass.Constexpr[int]

    @cute.jit
    def add(self, first, count):
        """Append the items `first` to `first` + `count` - 1; called by one thread."""
        place = cute.arch.atomic_add(self.counts.iterator + self.place, Int32(count), sem="relaxed", scope="gpu")
        for i in cutlass.range(count, unroll=1):
            self.items[place + i] = first + i


@dataclass(frozen=True)
class QueueScheduler:
    """The work of worker `worker` of `workers` in a queue: the items at positions `worker`, `worker` + `workers` and so
    on. Items are not split.

    In a SchedulerState, `query` is an item, and `wave` is the item's position in the queue.

    queries  every item is below this number
    items    the queue's entries
    count    number of items in the queue
    """

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
        return state.query, Int32(0)

    @cute.jit
    def advance(self, state: SchedulerState, query, tile, query_tiles):
        """Return the same as `StreamKScheduler.advance`. A work tile has all tiles of the item, so split_idx is always
        -1."""
        return Int32(0), query_tiles, Int32(-1), self.at(state.wave + self.workers)
