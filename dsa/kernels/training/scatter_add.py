"""Additions to global memory at addresses that only the kernel knows."""

import cutlass.cute as cute
from cutlass import Float32, Int64


@cute.jit
def add_4(target: Int64, values):
    """Add four fp32 numbers to those at the address `target`, a multiple of 16."""
    cute.arch.inline_ptx(
        "red.global.add.v4.f32 [{$r0}], {" + "{$r1}, {$r2}, {$r3}, {$r4}" + "};", read_only_args=[target, *values]
    )


@cute.jit
def add_fixed(target: Int64, value: Float32):
    """Add a number, rounded to an integer, to the 64-bit integer at the address `target`: in whatever order such sums
    come, they are the same."""
    cute.arch.inline_ptx(
        "{ .reg .s64 rounded; cvt.rni.s64.f32 rounded, {$r1}; red.global.add.u64 [{$r0}], rounded; }",
        read_only_args=[target, value],
    )
