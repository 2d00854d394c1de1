"""Means against spilling."""

import cutlass.cute as cute
from cutlass import Int32


@cute.jit
def computed_here(x: Int32):
    """x, which the compiler takes for new: what follows from it is not computed before a loop and kept in registers."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[Int32(x)])
