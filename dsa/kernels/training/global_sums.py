"""Instructions that add to sums in global memory (reductions in the L2 cache), and plain stores of sums.

Addresses are Int64: kernels compute them from indices, and byte offsets can exceed 32 bits.
"""

import cutlass.cute as cute
from cutlass import Float32, Int64


@cute.jit
def add_4(target: Int64, values):
    """Add four fp32 numbers to the four at global address `target`, a multiple of 16. The L2 cache adds in no fixed
    order, and the warp does not wait for the result."""
    cute.arch.inline_ptx(
        "red.relaxed.gpu.global.add.v4.f32 [{$r0}], {" + "{$r1}, {$r2}, {$r3}, {$r4}" + "};",
        read_only_args=[target, *values],
    )


@cute.jit
def store_4(target: Int64, values):
    """Store four 32-bit values at global address `target`, a multiple of 16."""
    cute.arch.inline_ptx(
        "st.global.v4.b32 [{$r0}], {" + "{$r1}, {$r2}, {$r3}, {$r4}" + "};",
        read_only_args=[target, *values],
    )


@cute.jit
def add_fixed(target: Int64, value: Float32):
    """Round `value` to an integer and add it to the 64-bit integer at global address `target`. Integer sums do not
    depend on the order of the terms."""
    cute.arch.inline_ptx(
        "{ .reg .s64 rounded; cvt.rni.s64.f32 rounded, {$r1}; red.global.add.u64 [{$r0}], rounded; }",
        read_only_args=[target, value],
    )
