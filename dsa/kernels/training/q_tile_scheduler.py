"""The dynamic persistent scheduler of the indexer's kernels that go by queries: a work tile is some neighbouring
queries of a q tile, with all keys that one of them sees.

CTAs draw work tiles from a tile counter in global memory as they become free. Later queries come first: in a causal
batch they see the most keys, so that short work tiles come last and all CTAs end together. Which CTA has a work tile
changes no result. A CTA's producer warp draws the number and passes its WorkTileInfo to the consumers in a pipeline of
two stages in shared memory.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from dsa.cute.fake_tensors import fake
from dsa.cute.pipeline import Pipeline, PipelineState, pipeline_storage
from dsa.kernels.training.limits import Q_TILE
from dsa.kernels.training.q_tiles import load_q_tile

INFO_STAGES = 2
INFO_WORDS = 8


@dataclass(frozen=True)
class WorkTileInfo:
    """q_tile: its number, -1 behind the last work tile; row: the work tile's first, of the q tile; first_q, rows: the
    q tile's; visible: how many keys the work tile's last query sees."""

    q_tile: Int32
    row: Int32
    first_q: Int32
    rows: Int32
    visible: Int32


class QTileScheduler:
    """Of work tiles of `queries` queries, a divisor of 128."""

    def __init__(self, queries: int):
        self.queries, self.work_tiles_a_q_tile = queries, Q_TILE // queries

    def storage(self) -> type:
        @cute.struct
        class SchedulerStorage:
            barriers: pipeline_storage(INFO_STAGES)
            info: cute.struct.MemRange[Int32, INFO_STAGES * INFO_WORDS]

        return SchedulerStorage

    def pipeline(self, storage) -> Pipeline:
        return Pipeline.of(storage.barriers, INFO_STAGES)

    @cute.jit
    def init(self, storage, consumers: cutlass.Constexpr):
        """One thread's work; `consumers` warps."""
        self.pipeline(storage).init(consumers)

    @cute.jit
    def advance(self, storage, tile_counter, q_tiles, state: PipelineState, lane):
        """Draw the next work tile that has rows, and pass it on to the consumers. The producer warp's work.
        -> (the q tile's number, -1 if there is no work tile left; the q tile; the first row; the next state)."""
        count = q_tiles.shape[0]
        number, row, found = Int32(-1), Int32(0), Int32(0)
        while found == 0:
            index = Int32(0)
            if lane == 0:
                index = cute.arch.atomic_add(tile_counter.iterator, Int32(1), scope="gpu")
            index = cute.arch.shuffle_sync(index, 0)
            found = Int32(1)
            if index < count * self.work_tiles_a_q_tile:
                number = count - 1 - index // self.work_tiles_a_q_tile
                row = (self.work_tiles_a_q_tile - 1 - index % self.work_tiles_a_q_tile) * self.queries
                if row >= q_tiles[number, 1]:
                    found = Int32(0)
                    number = Int32(-1)
        q_tile = load_q_tile(q_tiles, cutlass.max(number, 0))
        pipeline = self.pipeline(storage)
        pipeline.producer_wait(state)
        if lane == 0:
            info = storage.info.get_tensor(cute.make_layout((INFO_WORDS, INFO_STAGES)))
            values = (number, row, q_tile.first_q, q_tile.rows, q_tile.visible_to(row, self.queries))
            for i in cutlass.range_constexpr(len(values)):
                info[i, state.stage] = values[i]
            cute.arch.mbarrier_arrive(pipeline.producer_barrier(state))
        cute.arch.sync_warp()
        return number, q_tile, row, pipeline.advance(state)

    @cute.jit
    def current(self, storage, state: PipelineState):
        """The next work tile, and the next state. A consumer warp's work."""
        pipeline = self.pipeline(storage)
        pipeline.consumer_wait(state)
        info = storage.info.get_tensor(cute.make_layout((INFO_WORDS, INFO_STAGES)))
        work_tile = WorkTileInfo(*[info[i, state.stage] for i in range(5)])
        cute.arch.sync_warp()
        pipeline.consumer_release(state)
        return work_tile, pipeline.advance(state)


def fake_tile_counter() -> cute.Tensor:
    """int32 [1], 0 before the launch."""
    return fake(Int32, (1,), (1,), 4)
