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
- dynamic persistent: a CTA draws its next tile from a tile counter in global memory, int32 [1], 0 before the launch,
  when it is free. One warp draws, and passes the WorkTileInfo to the other warps in a pipeline (dsa/cute/pipeline.py)
  of stages in shared memory; `advance` draws and passes on, `current` waits for it and reads it.

How tiles are split and what is passed on differs between families, so the schedulers of the last two kinds are with
their kernels. They have these methods, in so far as they need them: `first()`, the CTA's first tile; `advance(tile)`,
the one behind it; `work_tile(index)`, its WorkTileInfo; `is_valid`, a field or property of it, False behind the last.

    scheduler = static_persistent_scheduler()
    for index in cutlass.range(scheduler.first, rows * columns, scheduler.step, unroll=1):
        tile = self.work_tile(index, columns)                  # -> WorkTileInfo(row, column)
"""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32


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
