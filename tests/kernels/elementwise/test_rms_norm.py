"""SASS of the RMS norm, its gradient and its fused forms, and the choice of their configurations."""

import pytest

from dsa.cute.sm90 import WARP
from dsa.kernels.elementwise import limits
from dsa.kernels.elementwise import rms_norm_gradient_sm90 as gradients
from dsa.kernels.elementwise import rms_norm_sm90 as kernels
from tests.kernels.variants import assert_counts, shipped

by_dtype = pytest.mark.parametrize("dtype", limits.DTYPES)


def halves(dtype):
    """Return the number of 16-byte vectors of fp32 weights per vector of this dtype."""
    return 1 if dtype == "float32" else 2


@shipped(kernels.compile_rms_norm)
def test_sass(sass, arguments):
    dtype, weighted, config = arguments
    weights = halves(dtype) if weighted else 0
    assert_counts(sass, LDG=config.vectors * (1 + weights), STG=config.vectors, BAR=config.lanes > WARP)
    # 80 registers allow 768 threads per SM, and 128 allow 512.
    assert sass.registers <= (80 if config.threads < 512 else 128)


@shipped(kernels.compile_rms_norm_rotary)
def test_sass_with_rope(sass, arguments):
    dtype, weighted, config = arguments
    weights = halves(dtype) if weighted else 0
    # Per vector there is one load of cosines and one of sines. Each loads four angles, or two for fp32 rows.
    assert_counts(sass, LDG=config.vectors * (3 + weights), STG=config.vectors, BAR=0)
    # With CTAs of 128 threads, 128 registers allow four CTAs per SM, and 64 allow eight. V4's query heads have two
    # vectors per lane.
    assert sass.registers <= (64 if config.vectors == 2 else 128)


@shipped(kernels.compile_rms_norm_cast)
def test_sass_with_a_cast(sass, arguments):
    dtype, summed, use_ue8m0, config = arguments
    # Stores per vector: norm, e4m3 values, scale; with a residual also the sum.
    loads, stores = 1 + summed + halves(dtype), 3 + summed
    assert_counts(sass, LDG=config.vectors * loads, STG=config.vectors * stores, BAR=config.lanes > WARP)
    # 80 registers allow 768 threads per SM, and 128 allow 512.
    assert sass.registers <= (80 if use_ue8m0 and config.threads < 512 else 128)


@shipped(gradients.compile_rms_norm_gradient)
def test_sass_of_gradients(sass, arguments):
    dtype, weighted, config = arguments
    vectors = config.vectors
    sums = vectors * halves(dtype) if weighted else 0
    assert_counts(sass, LDG=2 * vectors + sums, STG=vectors + sums, BAR=config.lanes > WARP)
    # 168 registers allow 384 threads per SM, and 255 allow 256.
    assert sass.registers <= (255 if weighted and vectors == 4 else 168)


@pytest.mark.parametrize(("dtype", "most"), limits.MAX_NORM_GRADIENT_CHANNELS.items())
def test_gradients_take_all_channels_up_to_their_limit(dtype, most):
    longest = kernels.choose_config(dtype, most, gradients.GRADIENT_CONFIGS)
    assert kernels.max_channels(dtype, longest) == most and longest.threads == 256
    for channels in range(8, most + 1, 8):
        config = kernels.choose_config(dtype, channels, gradients.GRADIENT_CONFIGS)
        assert kernels.max_channels(dtype, config) >= channels


@pytest.mark.parametrize("config", gradients.GRADIENT_CONFIGS)
def test_the_ctas_cover_all_rows_and_no_row_number_overflows(config):
    for rows in (1, 7, 132, 65536, limits.MAX_NORM_GRADIENT_ROWS):
        ctas = gradients.choose_ctas(rows, config, 132)
        at_a_time = ctas * (config.threads // config.lanes)
        turns = -(-rows // at_a_time)
        assert ctas >= 1 and turns * at_a_time >= rows and (turns + 1) * at_a_time < 2**31


@by_dtype
def test_every_row_length_has_a_configuration(dtype):
    width, last = 4 if dtype == "float32" else 8, 0
    for channels in range(8, kernels.max_channels(dtype) + 1, 8):
        config = kernels.choose_config(dtype, channels)
        assert config.lanes * config.vectors * width >= channels and config.threads % config.lanes == 0
        assert kernels.CONFIGS.index(config) >= last
        last = kernels.CONFIGS.index(config)
    assert last == len(kernels.CONFIGS) - 1


@by_dtype
def test_fused_norms_have_the_configuration_of_the_plain_norm(dtype):
    """With another configuration, a fused norm would add in another order, and could differ in the last bit."""
    for channels in range(256, limits.MAX_NORM_CAST_CHANNELS[dtype] + 1, 128):
        assert kernels.choose_config(dtype, channels, kernels.CAST_CONFIGS) == kernels.choose_config(dtype, channels)
    assert kernels.choose_config(dtype, 128, kernels.CAST_CONFIGS) == kernels.CAST_CONFIGS[0]
    for channels in range(8, limits.MAX_NORM_ROTARY_CHANNELS[dtype] + 1, 8):
        assert kernels.choose_config(dtype, channels, kernels.ROTARY_CONFIGS) == kernels.choose_config(dtype, channels)


@by_dtype
def test_limits_are_what_the_variants_hold(dtype):
    assert limits.MAX_NORM_CHANNELS[dtype] == kernels.max_channels(dtype)
    assert limits.MAX_NORM_CAST_CHANNELS[dtype] == kernels.max_channels(dtype, kernels.CAST_CONFIGS[-1])
    assert limits.MAX_NORM_ROTARY_CHANNELS[dtype] == kernels.max_channels(dtype, kernels.ROTARY_CONFIGS[-1])
    assert limits.MAX_NORM_ROWS == 2**31 - 2 * max(c.threads // c.lanes for c in kernels.CONFIGS)
