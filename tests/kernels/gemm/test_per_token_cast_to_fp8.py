"""The FP8 cast: SASS with 16-byte loads and conversion in hardware, and power-of-two scales that equal a CPU's."""

import numpy as np

from dsa.kernels.gemm import per_token_cast_to_fp8_sm90 as kernels
from tests.kernels.variants import assert_counts, shipped


@shipped(kernels.compile_per_token_cast_to_fp8)
def test_sass(sass, arguments):
    dtype, *_, config, scattered = arguments
    bytes_per_thread = config.channels * config.groups * (4 if dtype == "float32" else 2)
    # With `scattered`, each group also needs one load of the target row's index.
    assert_counts(sass, LDG=bytes_per_thread // 16 + scattered * config.groups)
    assert sass.instructions["F2FP"] >= config.channels * config.groups // 2
    assert sass.registers <= 64  # allows 1024 threads per SM; fewer threads do not hide the latency of memory


def test_powers_of_two_do_not_depend_on_how_448_divides():
    """The kernel multiplies by 1 / 448, and a CPU divides by 448. The quotients can differ, but not the next power of
    two."""
    amax = (np.arange(1 << 23, dtype=np.uint32) | np.uint32(127 << 23)).view(np.float32)
    product, quotient = amax * np.float32(1 / 448), amax / np.float32(448)
    assert not np.array_equal(product, quotient)
    powers = [(x.view(np.uint32) + np.uint32(0x007FFFFF)) & np.uint32(0xFF800000) for x in (product, quotient)]
    assert np.array_equal(*powers)
