"""Work tiles of MLA attention: WorkTileInfo, its pipeline, and the stream-K scheduler.

A work tile is a range of consecutive tiles of TILE_N keys, of one query (sparse) or one sequence (dense). The
load warps find work tiles from a plan or a StreamKScheduler and publish them to the other warps through a
WorkTilePipeline. A work tile that does not cover all keys of its query or sequence is a split. It writes a
partial result, which a combine kernel combines later.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from dsa.cute.pipeline import Mbarriers, PipelineState, arrive
from dsa.cute.work_tile import INFO_STAGES, WorkTilePipeline, work_tile_storage


class WorkTileInfo(NamedTuple):
    """What the other warps need to know of a work tile.

    batch_idx   sequence or query; negative after the last work tile
    first_tile  first tile of keys
    tiles       number of tiles
    split_idx   index of the partial result to write; negative if the work tile is not a split
    length      keys of the sequence (dense)
    seen        keys that the last query of the sequence may see (dense)
    """

    batch_idx: Int32
    first_tile: Int32
    tiles: Int32
    split_idx: Int32
    length: Int32
    seen: Int32

    @staticmethod
    def last() -> "WorkTileInfo":
        """Return the end marker, published after the last work tile."""
        return WorkTileInfo(Int32(-1), Int32(0), Int32(0), Int32(-1), Int32(0), Int32(0))


def announced_work_tile_storage() -> type:
    """Return the struct of an AnnouncedWorkTilePipeline, for a field of a @cute.struct."""

    @cute.struct
    class AnnouncedWorkTileStorage:
        batch_known: cute.struct.MemRange[Int64, INFO_STAGES]
        work_tiles: work_tile_storage(WorkTileInfo)
        batch_idx: cute.struct.MemRange[Int32, INFO_STAGES]

    return AnnouncedWorkTileStorage


@dataclass(frozen=True)
class AnnouncedWorkTilePipeline(WorkTilePipeline):
    """A WorkTilePipeline whose producer announces batch_idx before the rest, so that Q loads early.

    batch_known  one mbarrier per stage: batch_idx is written
    batch_idx    [stages]
    """

    batch_known: Mbarriers
    batch_idx: cute.Tensor

    @staticmethod
    def of(storage) -> "AnnouncedWorkTilePipeline":
        """Return the pipeline in the memory of `announced_work_tile_storage`."""
        work_tiles = WorkTilePipeline.of(storage.work_tiles, WorkTileInfo)
        return AnnouncedWorkTilePipeline(
            *(work_tiles.pipeline, work_tiles.info, WorkTileInfo),
            Mbarriers(storage.batch_known.data_ptr(), INFO_STAGES),
            storage.batch_idx.get_tensor(cute.make_layout(INFO_STAGES)),
        )

    @cute.jit
    def init(self, consumers: cutlass.Constexpr):
        """Initialize the barriers; called by one thread. `consumers` warps read each work tile."""
        self.batch_known.init(1)
        self.pipeline.init(consumers)

    @cute.jit
    def announce(self, state: PipelineState, batch_idx):
        """Wait for an empty stage and publish the next work tile's batch_idx; called by a warp, before `commit`."""
        self.pipeline.producer_wait(state)
        with cute.arch.elect_one():
            self.batch_idx[state.stage] = batch_idx
            arrive(self.batch_known.barrier(state.stage))

    @cute.jit
    def announced(self, state: PipelineState):
        """Wait for and return the next work tile's batch_idx."""
        self.batch_known.wait(state.phase, state.stage)
        return self.batch_idx[state.stage]


class SchedulerState(NamedTuple):
    """Position of a worker.

    query     next query of the full waves
    wave      next wave
    tile      the worker's first split tile, counted over all split queries; once split work has begun, the
              first tile of `query`
    left      split tiles left for this worker
    is_valid  whether there is any work left
    """

    query: Int32
    wave: Int32
    tile: Int32
    left: Int32
    is_valid: cutlass.Boolean


@dataclass(frozen=True)
class StreamKScheduler:
    """Stream-K over queries of at most `tiles` tiles, after full waves: the work of worker `worker` of `workers`.

    In wave w of the `full_waves` waves a worker computes the whole query worker + w * workers. The tiles of the
    remaining queries are divided evenly among the first `split_workers` workers, as if every query had `tiles`
    tiles. split_workers is at most the number of these tiles.

    So a query may be split between workers. A worker has at most two splits. The one with its query's first
    tile is partial result 2 * worker + 1, the other one 2 * worker.

    The training family's StreamKScheduler differs: it splits all of its work, which consists of spans of
    unequal lengths.
    """

    worker: Int32
    workers: Int32
    full_waves: Int32
    queries: Int32
    tiles: Int32
    split_workers: Int32

    def first_split(self):
        """Return the first query after the full waves."""
        return self.full_waves * self.workers

    def split_tiles(self):
        """Return the number of tiles of all queries after the full waves."""
        return (self.queries - self.full_waves * self.workers) * self.tiles

    @cute.jit
    def split_begin(self, worker: Int32):
        """Return the first of a worker's split tiles."""
        return cutlass.min(worker, self.split_workers) * self.split_tiles() // self.split_workers

    @cute.jit
    def worker_of(self, tile: Int32):
        """Return the worker that computes this split tile."""
        return ((tile + 1) * self.split_workers - 1) // self.split_tiles()

    @cute.jit
    def first(self) -> SchedulerState:
        """Return the state before the worker's first work tile."""
        query, wave, tile, left = self.worker, Int32(0), Int32(0), Int32(0)
        if self.first_split() < self.queries:
            tile = self.split_begin(self.worker)
            left = self.split_begin(self.worker + 1) - tile
        is_valid = (self.full_waves > 0 and query < self.queries) or left > 0
        return SchedulerState(query, wave, tile, left, is_valid)

    @cute.jit
    def locate(self, state: SchedulerState):
        """Return (query, its first tile) of the next work tile."""
        query, tile = state.query, state.tile
        if state.wave == self.full_waves:
            query, tile = self.first_split() + tile // self.tiles, tile % self.tiles
        return query, tile

    @cute.jit
    def advance(self, state: SchedulerState, query, tile, query_tiles):
        """Return (first tile, end tile, split_idx, next state) of the work tile at (query, tile).

        query_tiles: number of tiles that the query really has. The next state's `query` is a guess where
        split work begins; `locate` finds the real one.
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
