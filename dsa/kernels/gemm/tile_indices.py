"""Which work tile comes next: of a static persistent scheduler, or of a dynamic one.

Where work tiles take different times, as those of matrices with few rows do, CTAs that take tiles at fixed distances
drift apart, and what tiles of the same weights read is no longer in the L2 cache for the second one. So they draw: each
takes the next tile when it is free, and tiles that are neighbours are computed at the same time.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from dsa.cute.tile_counter import draw
from dsa.cute.work_tile import static_persistent_scheduler


@dataclass(frozen=True)
class TileIndices:
    """first: the CTA's first tile; step: how many CTAs there are. counter: a tile counter, of those behind each CTA's
    first; None: static."""

    first: Int32
    step: Int32
    counter: cute.Tensor | None

    @staticmethod
    def of(counter: cute.Tensor | None) -> "TileIndices":
        scheduler = static_persistent_scheduler()
        return TileIndices(scheduler.first, scheduler.step, counter)

    @cute.jit
    def behind(self, index, lane) -> Int32:
        """The tile behind tile `index` of this CTA. A warp's work; all lanes have it."""
        number = index + self.step
        if cutlass.const_expr(self.counter is not None):
            number = self.step + draw(self.counter, lane)
        return number
