"""SASS of SwiGLU with a cast: loads of 16 bytes, and few instructions and registers."""

from dsa.kernels.gemm import swiglu_cast_sm90 as kernels
from tests.kernels.variants import assert_counts, shipped


@shipped(kernels.compile_swiglu_cast, kernels.compile_gate_cast, kernels.compile_swiglu_cast_of_matrices)
def test_sass(sass, compile_function, arguments):
    dtype, use_ue8m0, *_ = arguments
    # of_matrices: one load for the last element of `ends`. ragged: rows whose last group has fewer than 128 channels
    # store values in two vectors. The last store is for the scale.
    of_matrices = compile_function is kernels.compile_swiglu_cast_of_matrices
    ragged = not of_matrices and arguments[-1]
    loads = 2 * kernels.CHANNELS * (4 if dtype == "float32" else 2) // 16
    assert_counts(sass, LDG=loads + of_matrices, STG=(2 if ragged else 1) + 1)
    # Per element: one exponential and one reciprocal. Per group: one reciprocal with UE8M0, else up to 5 for the
    # correctly rounded 1 / scale.
    assert sass.instructions["MUFU"] <= 2 * kernels.CHANNELS + (1 if use_ue8m0 else 5)
    # An SM can issue 34 instructions per element while memory moves a 16-bit element's bytes. So with up to 36, the
    # kernel is nearly bound by memory.
    assert sum(sass.instructions.values()) <= 36 * kernels.CHANNELS
    assert sass.registers <= 48  # allows 40 warps per SM
    assert 48 * kernels.THREADS * kernels.RESIDENT <= 65536
