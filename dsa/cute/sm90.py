"""Hopper's numbers, and what keeps a value where the code has it."""

import math

import cutlass.cute as cute
from cutlass import Int32

WARP = 32
WARPGROUP = 128  # threads that issue a wgmma together
SHARED_BYTES = 232448  # of a CTA, at most
# By the number of consumer warpgroups: registers of their threads, and of the producer warpgroup's. They are what a
# launch of all of them gives to a thread, redistributed.
REGISTERS = {2: (232, 40), 3: (160, 32), 4: (112, 32)}
LOG2E, LN2 = math.log2(math.e), math.log(2)


@cute.jit
def opaque(x: Int32):
    """x, of which ptxas knows nothing: what follows from it is not computed before a loop and kept in registers."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[Int32(x)])
