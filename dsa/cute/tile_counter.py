"""The tile counter of a dynamic persistent scheduler: int32 [1] in global memory, 0 before the launch.

CTAs draw the numbers of their work tiles from it as they become free, so that a CTA whose multiprocessor gets less of
the memory's bandwidth has fewer. Which CTA has a work tile changes no result.
"""

import cutlass.cute as cute
from cutlass import Int32

from dsa.cute.fake_tensors import fake


@cute.jit
def draw(tile_counter: cute.Tensor, lane):
    """The next number, which no other warp gets. A warp's work; all lanes have it."""
    number = Int32(0)
    if lane == 0:
        number = cute.arch.atomic_add(tile_counter.iterator, Int32(1), sem="relaxed", scope="gpu")
    return cute.arch.shuffle_sync(number, 0)


def fake_tile_counter() -> cute.Tensor:
    return fake(Int32, (1,), (1,), 4)
