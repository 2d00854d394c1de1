"""SwiGLU of two fp32 numbers. The separate cast and the products with a SwiGLU epilogue share this formula.

It is computed as gate * (1 / (1 + exp(-gate))) * up with the approximate reciprocal. The result is within 2^-20 of the
exact value, or within 1e-36 * max(|up|, 1): for gates below -88 exp(-gate) overflows to infinity, whose reciprocal is
0. Both kernels round it to a 16-bit type and get the same bits, whichever of them computes an expert.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32


@cute.jit
def swiglu(gate: Float32, up: Float32, limit: Float32 | None) -> Float32:
    """silu(gate) * up.

    limit  clamp gate to at most limit, and up to [-limit, limit], first; NaN stays NaN. None: no clamp
    """
    g, u = gate, up
    if cutlass.const_expr(limit is not None):
        g = cute.arch.fmin(g, limit, nan=True)
        u = cute.arch.fmax(cute.arch.fmin(u, limit, nan=True), -limit, nan=True)
    return g * cute.arch.rcp_approx(Float32(1.0) + cute.math.exp(-g)) * u
