"""SASS of SwiGLU with a cast: loads of 16 bytes, and few instructions and registers."""

from dsa.kernels.gemm import swiglu_cast_sm90 as kernels
from tests.kernels.variants import assert_counts, shipped


@shipped(kernels.compile_swiglu_cast, kernels.compile_swiglu_cast_of_matrices)
def test_sass(sass, compile_function, arguments):
    dtype, use_ue8m0, *_ = arguments
    # The kernel for several matrices also loads the last element of `ends`. The variant for rows whose last group has
    # fewer than 128 channels stores values in two vectors of 8 channels. One more store is for the scale.
    of_matrices = compile_function is kernels.compile_swiglu_cast_of_matrices
    ragged = not of_matrices and arguments[-1]
    loads = 2 * kernels.CHANNELS * (4 if dtype == "float32" else 2) // 16
    assert_counts(sass, LDG=loads + of_matrices, STG=(2 if ragged else 1) + 1)
    # One exponential and one reciprocal per element. For the group's scale, one reciprocal with UE8M0, otherwise at
    # most 5 instructions for the correctly rounded 1 / scale.
    assert sass.instructions["MUFU"] <= 2 * kernels.CHANNELS + (1 if use_ue8m0 else 5)
    # With 16-bit operands, an SM can issue 34 instructions per element while memory moves the element's bytes. The code
    # has at most 36 instructions per element, so the kernel is bound by memory, or nearly so.
    assert sum(sass.instructions.values()) <= 36 * kernels.CHANNELS
    assert sass.registers <= 48  # allows 40 warps per SM
    assert 48 * kernels.THREADS * kernels.RESIDENT <= 65536
