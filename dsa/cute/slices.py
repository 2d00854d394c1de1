"""Split-K slices with a fixed order of summation, however the work is divided (small_m_product.py)."""

import cutlass.cute as cute
from cutlass import Int32

SLICES = 64


@cute.jit
def slice_start(index: Int32, steps: Int32) -> Int32:
    """The first k-step of slice `index` of `steps`."""
    return index * (steps // SLICES) + index * (steps % SLICES) // SLICES
