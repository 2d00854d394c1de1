"""The tile counter of a dynamic persistent scheduler: int32 [1] in global memory, 0 before the launch.

A CTA that becomes free increments the counter to get its next work tile, so that a CTA on an SM with less memory
bandwidth computes fewer tiles. No result depends on which CTA computes a tile.
"""

import cutlass.cute as cute
from cutlass import Int32

from dsa.cute.fake_tensors import fake


@cute.jit
def draw(tile_counter: cute.Tensor, lane):
    """Return the counter's value and increment the counter. All lanes of the calling warp get the same value."""
    number = Int32(0)
    if lane == 0:
        number = cute.arch.atomic_add(tile_counter.iterator, Int32(1), sem="relaxed", scope="gpu")
    return cute.arch.shuffle_sync(number, 0)


def fake_tile_counter() -> cute.Tensor:
    return fake(Int32, (1,), (1,), 4)
