"""Sums of powers, computed where they stand."""

import cutlass.cute as cute
from cutlass import Float32


@cute.jit
def add_power(total: Float32, x: Float32, scale: Float32, more: Float32):
    """total + 2^(x * scale + more). The compiler does not move it behind a wait for a wgmma that it is to overlap."""
    return cute.arch.inline_ptx(
        "{ .reg .f32 e; fma.rn.ftz.f32 e, {$r1}, {$r2}, {$r3}; ex2.approx.ftz.f32 e, e; add.ftz.f32 {$w0}, {$r0}, e; }",
        write_only_types=[Float32],
        read_only_args=[total, x, scale, more],
    )
