"""The shipped variants of the RMS norm compile to sm_90a without spills, with loads and stores of 16 bytes."""

import pytest

from dsa.cute.sm90 import WARP
from dsa.kernels.elementwise import limits
from dsa.kernels.elementwise import rms_norm_gradient_limits as gradient_limits
from dsa.kernels.elementwise import rms_norm_gradient_sm90 as gradients
from dsa.kernels.elementwise import rms_norm_sm90 as kernels
from dsa.kernels.elementwise.rms_norm_rotary_limits import MAX_NORM_ROTARY_CHANNELS
from dsa.runtime.compile_cache import cubin
from dsa.runtime.sass import disassemble
from tests.kernels.variants import shipped


@shipped(kernels.compile_rms_norm)
def test_sass(arguments):
    dtype, weighted, config = arguments
    sass = disassemble(cubin(kernels.compile_rms_norm, *arguments))
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    # 768 threads a multiprocessor; the longest rows 512.
    assert sass.registers <= (80 if config.threads < 512 else 128)
    vectors = config.vectors
    weight_loads = vectors * (1 if dtype == "float32" else 2) if weighted else 0
    assert sass.instructions["LDG"] == vectors + weight_loads
    assert sass.instructions["STG"] == vectors
    assert sass.instructions["BAR"] == (config.lanes > WARP)


@shipped(kernels.compile_rms_norm_rotary)
def test_sass_with_rope(arguments):
    dtype, weighted, config = arguments
    sass = disassemble(cubin(kernels.compile_rms_norm_rotary, *arguments))
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    # Four CTAs of a multiprocessor; of V4's query heads eight.
    assert sass.registers <= (64 if config.vectors == 2 else 128)
    vectors = config.vectors
    halves = 1 if dtype == "float32" else 2
    # Of each vector also cos and sin, four angles or two of each.
    assert sass.instructions["LDG"] == vectors * (3 + (halves if weighted else 0))
    assert sass.instructions["STG"] == vectors and not sass.instructions["BAR"]


@shipped(kernels.compile_rms_norm_cast)
def test_sass_with_a_cast(arguments):
    dtype, summed, use_ue8m0, config = arguments
    sass = disassemble(cubin(kernels.compile_rms_norm_cast, *arguments))
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    # 768 threads a multiprocessor; the longest rows 512, and those whose scales are no powers of two.
    assert sass.registers <= (80 if use_ue8m0 and config.threads < 512 else 128)
    vectors = config.vectors
    assert sass.instructions["LDG"] == vectors * (1 + summed + (1 if dtype == "float32" else 2))
    # Stores per vector: norm, e4m3 values, scale; with a residual also the sum.
    assert sass.instructions["STG"] == vectors * (3 + summed)
    assert sass.instructions["BAR"] == (config.lanes > WARP)


@shipped(gradients.compile_rms_norm_gradient)
def test_sass_of_gradients(arguments):
    dtype, weighted, config = arguments
    sass = disassemble(cubin(gradients.compile_rms_norm_gradient, *arguments))
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    vectors = config.vectors
    # 384 threads per SM; 256 where a lane has four vectors and their weights.
    assert sass.registers <= (255 if weighted and vectors == 4 else 168)
    sums = vectors * (1 if dtype == "float32" else 2) if weighted else 0
    assert sass.instructions["LDG"] == 2 * vectors + sums and sass.instructions["STG"] == vectors + sums
    assert sass.instructions["BAR"] == (config.lanes > WARP)


def test_gradients_take_what_their_limits_say():
    for dtype, most in gradient_limits.MAX_NORM_GRADIENT_CHANNELS.items():
        longest = gradients.choose_gradient_config(dtype, most)
        assert kernels.max_channels(dtype, longest) == most and longest.threads == 256
        for channels in range(8, most + 1, 8):
            assert kernels.max_channels(dtype, gradients.choose_gradient_config(dtype, channels)) >= channels
    variants = gradients.shipped_variants()
    assert len(variants) == len(set(variants)) == 6 * len(gradients.GRADIENT_CONFIGS)


@pytest.mark.parametrize("config", gradients.GRADIENT_CONFIGS)
def test_all_rows_have_a_turn(config):
    """And no row number overflows 31 bits."""
    for rows in (1, 7, 132, 65536, gradient_limits.MAX_NORM_GRADIENT_ROWS):
        ctas = gradients.choose_ctas(rows, config, 132)
        at_a_time = ctas * (config.threads // config.lanes)
        turns = -(-rows // at_a_time)
        assert ctas >= 1 and turns * at_a_time >= rows and (turns + 1) * at_a_time < 2**31


def test_every_variant_is_shipped_once():
    variants = kernels.shipped_variants()
    norms = 2 * len(kernels.CONFIGS) + 2 * len(kernels.ROTARY_CONFIGS) + 4 * len(kernels.CAST_CONFIGS)
    assert len(variants) == len(set(variants)) == 3 * norms


@pytest.mark.parametrize("dtype", limits.DTYPES)
def test_every_row_length_has_a_configuration(dtype):
    width = 4 if dtype == "float32" else 8
    last = 0
    for channels in range(8, kernels.max_channels(dtype) + 1, 8):
        config = kernels.choose_config(dtype, channels)
        assert config.lanes * config.vectors * width >= channels and config.threads % config.lanes == 0
        at = kernels.CONFIGS.index(config)
        assert at >= last
        last = at
    assert last == len(kernels.CONFIGS) - 1


@pytest.mark.parametrize("dtype", limits.DTYPES)
def test_rows_with_a_cast_have_the_configuration_of_those_without(dtype):
    """So that they have the same bits."""
    for channels in range(256, limits.MAX_NORM_CAST_CHANNELS[dtype] + 1, 128):
        assert kernels.choose_cast_config(dtype, channels) == kernels.choose_config(dtype, channels)
    assert kernels.choose_cast_config(dtype, 128) == kernels.CAST_CONFIGS[0]


@pytest.mark.parametrize("dtype", limits.DTYPES)
def test_rows_with_rope_have_the_configuration_of_those_without(dtype):
    """So that they have the same bits."""
    for channels in range(8, MAX_NORM_ROTARY_CHANNELS[dtype] + 1, 8):
        assert kernels.choose_rotary_config(dtype, channels) == kernels.choose_config(dtype, channels)


def test_limits_are_what_the_variants_hold():
    longest = {dtype: kernels.max_channels(dtype, kernels.CAST_CONFIGS[-1]) for dtype in limits.DTYPES}
    assert limits.MAX_NORM_CAST_CHANNELS == longest
    longest = {dtype: kernels.max_channels(dtype, kernels.ROTARY_CONFIGS[-1]) for dtype in limits.DTYPES}
    assert MAX_NORM_ROTARY_CHANNELS == longest
    assert limits.MAX_NORM_CHANNELS == {dtype: kernels.max_channels(dtype) for dtype in limits.DTYPES}
    assert limits.MAX_NORM_ROWS == 2**31 - 2 * max(c.threads // c.lanes for c in kernels.CONFIGS)
