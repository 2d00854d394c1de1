"""Split-K slices. The number of slices and the order in which their partial sums are added are fixed. So results do not
depend on how a kernel divides the slices among warps and CTAs (small_m_product.py)."""

import cutlass.cute as cute
from cutlass import Int32

SLICES = 64


@cute.jit
def slice_start(index: Int32, steps: Int32) -> Int32:
    """Return the first k-step of slice `index`, where `steps` k-steps are divided as evenly as possible into SLICES
    slices."""
    return index * (steps // SLICES) + index * (steps % SLICES) // SLICES
