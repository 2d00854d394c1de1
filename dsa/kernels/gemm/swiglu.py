"""SwiGLU of two fp32 numbers: one formula for the cast on its own and for the products that end in it.

It is computed as gate * (1 / (1 + exp(-gate))) * up with the approximate reciprocal, which is within 2^-20 of the exact
value, or within 1e-36 * max(|up|, 1): exp(-gate) overflows to infinity for gates below -88, whose reciprocal is 0. What
both kernels round to a 16-bit type are then the same bits, whichever of them an expert goes through.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32


@cute.jit
def swiglu(gate: Float32, up: Float32, limit: Float32 | None) -> Float32:
    """silu(gate) * up.

    limit  gate is first clamped to at most that, up from -limit to limit; NaN stays. None: no clamp
    """
    g, u = gate, up
    if cutlass.const_expr(limit is not None):
        g = cute.arch.fmin(g, limit, nan=True)
        u = cute.arch.fmax(cute.arch.fmin(u, limit, nan=True), -limit, nan=True)
    return g * cute.arch.rcp_approx(Float32(1.0) + cute.math.exp(-g)) * u
