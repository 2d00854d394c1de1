"""Products that are rounded to fp32 before they are added, as in the references, where a product and a sum are separate
PyTorch operations. So results have the references' bits."""

import cutlass.cute as cute
from cutlass import Float32


@cute.jit
def multiply_rounded(a: Float32, b: Float32) -> Float32:
    """Return a * b, rounded to fp32. ptxas does not fuse mul.rn with a following addition."""
    return cute.arch.inline_ptx("mul.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


@cute.jit
def rotate_pair(a: Float32, b: Float32, cos: Float32, sin: Float32):
    """Rotate the pair (a, b) by an angle, as RoPE does. -> (a cos - b sin, a sin + b cos), with each product rounded to
    fp32 before the addition."""
    first = multiply_rounded(a, cos) - multiply_rounded(b, sin)
    return first, multiply_rounded(a, sin) + multiply_rounded(b, cos)
