"""Work-tile schedulers of persistent kernels: which parts of the result a CTA computes, and in which order.

A scheduler gives a CTA the index of the CTA's next work tile. The kernel's method `work_tile(index, ...)` turns the
index into a WorkTileInfo, a NamedTuple or frozen dataclass of Int32: coordinates, bounds, the number of mainloop steps.
There are three kinds of schedulers:

- static persistent: CTA i computes the tiles i, i + CTAs, i + 2 CTAs and so on. Most kernels with this order use
  `StaticPersistentScheduler` below. Every warp can compute the order itself, so warps need not exchange it.
- stream-K: the mainloop steps of all tiles form one sequence, which is divided evenly among the CTAs. A tile can be
  split between adjacent CTAs, which then write partial results. Some schedulers compute full waves of unsplit tiles
  first, so that only the remaining tiles are split.
- dynamic persistent: a CTA that becomes free takes its next tile from a counter in global memory (tile_counter.py).

How tiles are split differs between kernel families, so stream-K and dynamic schedulers are defined next to their
kernels. Several of them have a method `first`, which returns the state before the CTA's first tile, and a method
`advance`, which returns the state after a tile. `is_valid` of such a state is False after the last tile. A kernel with
a StaticPersistentScheduler needs no state:

    scheduler = static_persistent_scheduler()
    for index in cutlass.range(scheduler.first, rows * columns, scheduler.step, unroll=1):
        tile = self.work_tile(index, columns)                  # -> WorkTileInfo(row, column)

If only one warp determines the CTA's next work tile, it passes the WorkTileInfo, a NamedTuple of Int32, to the other
warps through a WorkTilePipeline, a ring of two stages in shared memory:

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

After the last work tile the scheduler publishes an invalid WorkTileInfo. To mark it, each kernel chooses a field and a
value that no work tile has in this field, here rows = 0.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from dsa.cute.pipeline import Pipeline, PipelineState, arrive, pipeline_storage

INFO_STAGES = 2


class StaticPersistentScheduler(NamedTuple):
    """A CTA's tiles: `first`, `first` + `step`, `first` + 2 `step` and so on."""

    first: Int32
    step: Int32


@cute.jit
def static_persistent_scheduler() -> StaticPersistentScheduler:
    cta, _, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    return StaticPersistentScheduler(cta, ctas)


def _words(info_type: type) -> int:
    """Return the number of 32-bit words per stage: one per field, rounded up to a multiple of 4. So stages are aligned
    to 16 bytes, and fields are read and written as vectors."""
    return -(-len(info_type._fields) // 4) * 4


def work_tile_storage(info_type: type) -> type:
    @cute.struct
    class WorkTileStorage:
        barriers: pipeline_storage(INFO_STAGES)
        info: cute.struct.Align[cute.struct.MemRange[Int32, _words(info_type) * INFO_STAGES], 16]

    return WorkTileStorage


@dataclass(frozen=True)
class WorkTilePipeline:
    """A ring in shared memory through which one warp passes work tiles to other warps. info [fields, stages] contains
    one WorkTileInfo, of type `info_type`, per stage."""

    pipeline: Pipeline
    info: cute.Tensor
    info_type: cutlass.Constexpr[Any]

    @staticmethod
    def of(storage, info_type: type) -> "WorkTilePipeline":
        layout = cute.make_layout((len(info_type._fields), INFO_STAGES), stride=(1, _words(info_type)))
        info = storage.info.get_tensor(layout)
        return WorkTilePipeline(Pipeline.of(storage.barriers, INFO_STAGES), info, info_type)

    @cute.jit
    def init(self, consumers: cutlass.Constexpr):
        """Initialise the barriers for `consumers` warps, which all read each work tile. One thread calls this."""
        self.pipeline.init(consumers)

    @cute.jit
    def publish(self, state: PipelineState, info) -> PipelineState:
        """Write a work tile to the state's stage when it is empty, and return the next state. One warp calls this."""
        self.pipeline.producer_wait(state)
        return self.commit(state, info)

    @cute.jit
    def commit(self, state: PipelineState, info) -> PipelineState:
        """Write a work tile to a stage that the caller knows to be empty. Return the next state."""
        with cute.arch.elect_one():
            write_info(self.info, state.stage, info)
            arrive(self.pipeline.producer_barrier(state))
        return self.pipeline.advance(state)

    @cute.jit
    def current(self, state: PipelineState):
        self.pipeline.consumer_wait(state)
        return self.read(state)

    @cute.jit
    def read(self, state: PipelineState):
        """Read the current work tile again, so that the caller need not keep the fields in registers. Call this before
        `release`."""
        return read_info(self.info_type, self.info, state.stage)

    @cute.jit
    def release(self, state: PipelineState) -> PipelineState:
        """Release the work tile after this warp has read it. Return the next state."""
        cute.arch.sync_warp()
        self.pipeline.consumer_release(state)
        return self.pipeline.advance(state)


@cute.jit
def write_info(memory: cute.Tensor, stage: Int32, info):
    for i in cutlass.range_constexpr(len(info)):
        memory[i, stage] = info[i]


@cute.jit
def read_info(info_type: cutlass.Constexpr, memory: cute.Tensor, stage: Int32):
    return info_type(*[memory[i, stage] for i in range(len(info_type._fields))])
