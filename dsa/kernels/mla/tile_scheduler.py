"""Which work tiles a CTA computes, and how its load warps tell the other warps about them.

A work tile is what a CTA does of one query (sparse) or of one sequence (dense): some consecutive tiles of TILE_N keys.
The load warps find the work tiles, by a plan or by a StreamKScheduler, and hand them on through a ring of WORK_STAGES
stages: `WorkTileRing`. A work tile that is not all of its query's or sequence's keys is a split, and writes a partial
result, which is combined later.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from dsa.cute.pipeline import Pipeline, PipelineState

WORK_STAGES = 2
_FIELDS = 8  # numbers of a stage, padded


@dataclass(frozen=True)
class WorkTileInfo:
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


class Field(IntEnum):
    """What a stage of the ring holds."""

    BATCH_IDX = 0
    FIRST_TILE = 1
    TILES = 2
    SPLIT_IDX = 3
    LENGTH = 4
    SEEN = 5


@dataclass(frozen=True)
class WorkTileRing:
    """batch_known  barriers, one a stage: batch_idx is there, before the rest where that helps
    pipeline     full and empty barriers of the stages
    info         [8, WORK_STAGES] the Fields
    """

    batch_known: cute.Pointer
    pipeline: Pipeline
    info: cute.Tensor

    @staticmethod
    def of(storage) -> "WorkTileRing":
        """Of a struct with the members work_batch_known, work_full, work_empty and work_info."""
        return WorkTileRing(
            storage.work_batch_known.data_ptr(),
            Pipeline(storage.work_full.data_ptr(), storage.work_empty.data_ptr(), WORK_STAGES, Int32(0)),
            storage.work_info.get_tensor(cute.make_layout((_FIELDS, WORK_STAGES))),
        )

    @cute.jit
    def init(self, consumers: cutlass.Constexpr):
        """Make the barriers; so many warps read work tiles. One thread's work."""
        for i in cutlass.range_constexpr(WORK_STAGES):
            cute.arch.mbarrier_init(self.batch_known + i, 1)
            cute.arch.mbarrier_init(self.pipeline.full + i, 1)
            cute.arch.mbarrier_init(self.pipeline.empty + i, consumers)

    @cute.jit
    def announce(self, batch_idx, state: PipelineState):
        """Wait for an empty stage and say whose the next work tile is. A warp's work."""
        self.pipeline.producer_wait(state)
        with cute.arch.elect_one():
            self.info[Field.BATCH_IDX, state.stage] = batch_idx
            cute.arch.mbarrier_arrive(self.batch_known + state.stage)

    @cute.jit
    def publish(self, state: PipelineState, first_tile, tiles, split_idx, length, seen):
        """The rest of what was announced. A warp's work."""
        with cute.arch.elect_one():
            self.info[Field.FIRST_TILE, state.stage] = first_tile
            self.info[Field.TILES, state.stage] = tiles
            self.info[Field.SPLIT_IDX, state.stage] = split_idx
            self.info[Field.LENGTH, state.stage] = length
            self.info[Field.SEEN, state.stage] = seen
            cute.arch.mbarrier_arrive(self.pipeline.full + state.stage)

    @cute.jit
    def publish_end(self, state: PipelineState):
        """There are no more work tiles. A warp's work."""
        self.announce(Int32(-1), state)
        self.pipeline.producer_commit(state)

    @cute.jit
    def read_batch_idx(self, state: PipelineState):
        """Whose the next work tile is."""
        cute.arch.mbarrier_wait(self.batch_known + state.stage, state.phase)
        return self.info[Field.BATCH_IDX, state.stage]

    @cute.jit
    def read(self, batch_idx, state: PipelineState) -> WorkTileInfo:
        """The whole work tile, behind `read_batch_idx`. The stage is free for the next one afterwards."""
        self.pipeline.consumer_wait(state)
        fields = (Field.FIRST_TILE, Field.TILES, Field.SPLIT_IDX, Field.LENGTH, Field.SEEN)
        work = WorkTileInfo(batch_idx, *[self.info[field, state.stage] for field in fields])
        self.pipeline.consumer_release(state)
        return work

    @cute.jit
    def read_result(self, state: PipelineState):
        """(batch_idx, tiles, split_idx): what a warpgroup that writes the result needs. The stage is free then."""
        self.pipeline.consumer_wait(state)
        fields = (Field.BATCH_IDX, Field.TILES, Field.SPLIT_IDX)
        batch_idx, tiles, split_idx = [self.info[field, state.stage] for field in fields]
        self.pipeline.consumer_release(state)
        return batch_idx, tiles, split_idx


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
    """Stream-K over queries of equally many tiles: what worker number `worker` of `workers` does.

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
    def take(self, state: SchedulerState, query, tile, query_tiles):
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
