"""SASS of the rotation with a cast: loads of 16 bytes."""

from dsa.kernels.gemm import rotary_cast_to_fp8_sm90 as kernels
from tests.kernels.variants import assert_counts, shipped


@shipped(kernels.compile_rotary_cast_to_fp8)
def test_sass(sass, arguments):
    dtype, _ = arguments
    # Loads: a lane's channels, and cos and sin of four angles. Stores: the lane's bytes and a scale.
    assert_counts(sass, LDG=kernels.CHANNELS * (4 if dtype == "float32" else 2) // 16 + 2, STG=2)
    assert sass.registers <= 32  # allows the maximum of 2048 threads per SM
