"""The order of a CTA's work tiles: static persistent or dynamic scheduling.

With static scheduling CTAs take tiles at a fixed distance. If work tiles take different times, as those of matrices
with few rows do, the CTAs drift apart. Weights that several tiles read are then no longer in the L2 cache when the
second tile reads them. With dynamic scheduling a CTA takes the next tile when it becomes free, so neighbouring tiles
are computed at the same time.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from dsa.cute.tile_counter import draw
from dsa.cute.work_tile import static_persistent_scheduler


@dataclass(frozen=True)
class TileIndices:
    """The tile indices of a CTA.

    first    its first tile
    step     the number of CTAs
    counter  a tile counter for the tiles after the first tile of each CTA. None: static
    """

    first: Int32
    step: Int32
    counter: cute.Tensor | None

    @staticmethod
    def of(counter: cute.Tensor | None) -> "TileIndices":
        scheduler = static_persistent_scheduler()
        return TileIndices(scheduler.first, scheduler.step, counter)

    @cute.jit
    def behind(self, index, lane) -> Int32:
        """The tile after tile `index` of this CTA. Called by one warp; returned to all lanes."""
        number = index + self.step
        if cutlass.const_expr(self.counter is not None):
            number = self.step + draw(self.counter, lane)
        return number
