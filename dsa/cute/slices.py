"""The slices of a sum whose order does not depend on how the work is divided: see the kernels that use them."""

import cutlass.cute as cute
from cutlass import Int32

SLICES = 64


@cute.jit
def slice_start(index: Int32, steps: Int32) -> Int32:
    """The first step of a slice."""
    return index * (steps // SLICES) + index * (steps % SLICES) // SLICES
