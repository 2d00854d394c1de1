"""Work-tile schedulers of persistent kernels: which parts of the result a CTA computes, one after the other.

A work tile is what a CTA computes between two questions to its scheduler. Tiles are numbered, and a scheduler gives
numbers; what a number means, its WorkTileInfo (a NamedTuple or frozen dataclass of Int32: coordinates, bounds, a number
of mainloop steps), is found by the kernel's method `work_tile(index, ...)`. There are three schedulers; kernels name
them and their parts so:

- static persistent: CTA i takes the tiles i, i + CTAs, i + 2 CTAs and so on. `StaticPersistentScheduler` below is for
  all families. All warps of a CTA know the order and may walk it by themselves.
- stream-K: the mainloop steps of all tiles, one after the other, are a line of which every CTA has an even part, so a
  tile may be split between neighbours, and each writes a partial result. Full waves: as many whole tiles as all CTAs
  take at once may come first, so that only the tiles behind them are split.
- dynamic persistent: a CTA draws its next tile from a tile counter in global memory (tile_counter.py) when it is free.

How tiles are split differs between families, so the schedulers of the last two kinds are with their kernels. They have
these methods, in so far as they need them: `first()`, the CTA's first tile; `advance(tile)`, the one behind it;
`work_tile(index)`, its WorkTileInfo; `is_valid`, a field or property of it, False behind the last.

    scheduler = static_persistent_scheduler()
    for index in cutlass.range(scheduler.first, rows * columns, scheduler.step, unroll=1):
        tile = self.work_tile(index, columns)                  # -> WorkTileInfo(row, column)

Where one warp alone knows or draws the CTA's next work tile, it passes the WorkTileInfo, a NamedTuple of Int32, to the
others through a WorkTilePipeline, a ring of two stages in shared memory:

    class Storage:                                             # a @cute.struct, the CTA's shared memory
        work_tiles: work_tile_storage(WorkTileInfo)
    work_tiles = WorkTilePipeline.of(storage.work_tiles, WorkTileInfo)
    if tid == 0:
        work_tiles.init(consumers=8)                           # eight warps read and release a work tile

    # The scheduler's warp:                                    # Any other warp:
    state = start()                                            state = start()
    while ...:                                                 work_tile = work_tiles.current(state)
        state = work_tiles.publish(state, WorkTileInfo(...))   while work_tile.rows > 0:
    state = work_tiles.publish(state, WorkTileInfo.last())         ...
                                                                   state = work_tiles.release(state)
                                                                   work_tile = work_tiles.current(state)

What tells that there is no work tile left is the kernel's choice, a field with a value that no work tile has.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from dsa.cute.pipeline import Pipeline, PipelineState, arrive, pipeline_storage

INFO_STAGES = 2


class StaticPersistentScheduler(NamedTuple):
    """The tiles `first`, `first` + `step` and so on are this CTA's."""

    first: Int32
    step: Int32


@cute.jit
def static_persistent_scheduler() -> StaticPersistentScheduler:
    """Of a grid of one dimension."""
    cta, _, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    return StaticPersistentScheduler(cta, ctas)


def _words(info_type: type) -> int:
    """Of a stage: its fields begin at 16 bytes, so that they are read and written several at a time."""
    return -(-len(info_type._fields) // 4) * 4


def work_tile_storage(info_type: type) -> type:
    """The shared memory of a WorkTilePipeline: a field of a @cute.struct."""

    @cute.struct
    class WorkTileStorage:
        barriers: pipeline_storage(INFO_STAGES)
        info: cute.struct.Align[cute.struct.MemRange[Int32, _words(info_type) * INFO_STAGES], 16]

    return WorkTileStorage


@dataclass(frozen=True)
class WorkTilePipeline:
    """info: the fields of `info_type`, a NamedTuple of Int32, of each stage [fields, stages]."""

    pipeline: Pipeline
    info: cute.Tensor
    info_type: cutlass.Constexpr[Any]

    @staticmethod
    def of(storage, info_type: type) -> "WorkTilePipeline":
        """Of what `work_tile_storage(info_type)` has reserved."""
        layout = cute.make_layout((len(info_type._fields), INFO_STAGES), stride=(1, _words(info_type)))
        info = storage.info.get_tensor(layout)
        return WorkTilePipeline(Pipeline.of(storage.barriers, INFO_STAGES), info, info_type)

    @cute.jit
    def init(self, consumers: cutlass.Constexpr):
        """Make the barriers; so many warps read each work tile. One thread's work."""
        self.pipeline.init(consumers)

    @cute.jit
    def publish(self, state: PipelineState, info) -> PipelineState:
        """Pass a work tile on. A warp's work. -> the state behind it."""
        self.pipeline.producer_wait(state)
        return self.commit(state, info)

    @cute.jit
    def commit(self, state: PipelineState, info) -> PipelineState:
        """The same behind a wait for the empty stage."""
        with cute.arch.elect_one():
            write_info(self.info, state.stage, info)
            arrive(self.pipeline.producer_barrier(state))
        return self.pipeline.advance(state)

    @cute.jit
    def current(self, state: PipelineState):
        """Wait for the next work tile. -> its info_type."""
        self.pipeline.consumer_wait(state)
        return self.read(state)

    @cute.jit
    def read(self, state: PipelineState):
        """The same again, where registers should not hold it until then."""
        return read_info(self.info_type, self.info, state.stage)

    @cute.jit
    def release(self, state: PipelineState) -> PipelineState:
        """This warp has read the work tile. -> the state behind it."""
        cute.arch.sync_warp()
        self.pipeline.consumer_release(state)
        return self.pipeline.advance(state)


@cute.jit
def write_info(memory: cute.Tensor, stage: Int32, info):
    """A WorkTileInfo to a stage of memory [fields, stages]. One thread's work."""
    for i in cutlass.range_constexpr(len(info)):
        memory[i, stage] = info[i]


@cute.jit
def read_info(info_type: cutlass.Constexpr, memory: cute.Tensor, stage: Int32):
    """The WorkTileInfo that is there."""
    return info_type(*[memory[i, stage] for i in range(len(info_type._fields))])
