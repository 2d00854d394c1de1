"""Which work tiles a CTA computes, and what its load warps tell the other warps about them.

A work tile is what a CTA does of one query (sparse) or of one sequence (dense): some consecutive tiles of TILE_N keys.
The load warps find the work tiles, by a plan or by a StreamKScheduler, and pass them on through a WorkTilePipeline. A
work tile that is not all of its query's or sequence's keys is a split, and writes a partial result, which is combined
later.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from dsa.cute.pipeline import Mbarriers, PipelineState, arrive
from dsa.cute.work_tile import INFO_STAGES, WorkTilePipeline, work_tile_storage


class WorkTileInfo(NamedTuple):
    """batch_idx   the sequence or query; negative: there are no more work tiles
    first_tile  the first tile of keys
    tiles       how many there are
    split_idx   the partial result to write; negative: the work tile is not a split
    length      keys of the sequence (dense)
    seen        keys that the sequence's last query may see (dense)
    """

    batch_idx: Int32
    first_tile: Int32
    tiles: Int32
    split_idx: Int32
    length: Int32
    seen: Int32

    @staticmethod
    def last() -> "WorkTileInfo":
        """There are no more work tiles."""
        return WorkTileInfo(Int32(-1), Int32(0), Int32(0), Int32(-1), Int32(0), Int32(0))


def announced_work_tile_storage() -> type:
    """The shared memory of an AnnouncedWorkTilePipeline: a field of a @cute.struct."""

    @cute.struct
    class AnnouncedWorkTileStorage:
        batch_known: cute.struct.MemRange[Int64, INFO_STAGES]
        work_tiles: work_tile_storage(WorkTileInfo)
        batch_idx: cute.struct.MemRange[Int32, INFO_STAGES]

    return AnnouncedWorkTileStorage


@dataclass(frozen=True)
class AnnouncedWorkTilePipeline(WorkTilePipeline):
    """A WorkTilePipeline whose producer announces each work tile's batch_idx before it knows the rest, so that the
    queries are loaded meanwhile.

    batch_known  one barrier a stage: its batch_idx is there
    batch_idx    [stages]
    """

    batch_known: Mbarriers
    batch_idx: cute.Tensor

    @staticmethod
    def of(storage) -> "AnnouncedWorkTilePipeline":
        """Of what `announced_work_tile_storage` has reserved."""
        work_tiles = WorkTilePipeline.of(storage.work_tiles, WorkTileInfo)
        return AnnouncedWorkTilePipeline(
            *(work_tiles.pipeline, work_tiles.info, WorkTileInfo),
            Mbarriers(storage.batch_known.data_ptr(), INFO_STAGES),
            storage.batch_idx.get_tensor(cute.make_layout(INFO_STAGES)),
        )

    @cute.jit
    def init(self, consumers: cutlass.Constexpr):
        """Make the barriers; so many warps read each work tile. One thread's work."""
        self.batch_known.init(1)
        self.pipeline.init(consumers)

    @cute.jit
    def announce(self, state: PipelineState, batch_idx):
        """Wait for an empty stage and say whose the next work tile is. A warp's work, which `commit` follows."""
        self.pipeline.producer_wait(state)
        with cute.arch.elect_one():
            self.batch_idx[state.stage] = batch_idx
            arrive(self.batch_known.barrier(state.stage))

    @cute.jit
    def announced(self, state: PipelineState):
        """Whose the next work tile is."""
        self.batch_known.wait(state.phase, state.stage)
        return self.batch_idx[state.stage]


class SchedulerState(NamedTuple):
    """Where a worker is: the query and the wave that come next, the first tile there, and how many of the split tiles
    are left for it; is_valid: whether there is any work."""

    query: Int32
    wave: Int32
    tile: Int32
    left: Int32
    is_valid: cutlass.Boolean


@dataclass(frozen=True)
class StreamKScheduler:
    """Stream-K over queries of equally many tiles, with full waves: what worker number `worker` of `workers` does. The
    training family's StreamKScheduler differs in that its line is of spans of unequal lengths, all of which it splits.

    In each of `full_waves` waves a worker has one whole query: worker, worker + workers and so on. The tiles of the
    queries behind these waves, if there are any, are split: the first `split_workers` workers have an even share of
    them each, counted as if every query had `tiles`; split_workers is no more than there are tiles.

    So a query may be split. Of a worker's splits of one query, which are two at most, the one with the query's first
    tile has the partial result 2 * worker + 1, the other 2 * worker.
    """

    worker: Int32
    workers: Int32
    full_waves: Int32
    queries: Int32
    tiles: Int32
    split_workers: Int32

    def first_split(self):
        """The first query behind the full waves."""
        return self.full_waves * self.workers

    def split_tiles(self):
        """Tiles of all queries from there on."""
        return (self.queries - self.full_waves * self.workers) * self.tiles

    @cute.jit
    def split_begin(self, worker: Int32):
        """The first of a worker's split tiles."""
        return cutlass.min(worker, self.split_workers) * self.split_tiles() // self.split_workers

    @cute.jit
    def worker_of(self, tile: Int32):
        """The worker that has this split tile."""
        return ((tile + 1) * self.split_workers - 1) // self.split_tiles()

    @cute.jit
    def first(self) -> SchedulerState:
        query, wave, tile, left = self.worker, Int32(0), Int32(0), Int32(0)
        if self.first_split() < self.queries:
            tile = self.split_begin(self.worker)
            left = self.split_begin(self.worker + 1) - tile
        is_valid = (self.full_waves > 0 and query < self.queries) or left > 0
        return SchedulerState(query, wave, tile, left, is_valid)

    @cute.jit
    def locate(self, state: SchedulerState):
        """(query, its first tile) of the next work tile."""
        query, tile = state.query, state.tile
        if state.wave == self.full_waves:
            query, tile = self.first_split() + tile // self.tiles, tile % self.tiles
        return query, tile

    @cute.jit
    def advance(self, state: SchedulerState, query, tile, query_tiles):
        """The work tile at (query, tile) of a query that has `query_tiles`: its first tile, the one behind its last,
        its split_idx, and the state behind it, whose query is the next one unless `is_valid` is False."""
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
