"""The FP8 product for few rows: its SASS, with FP8 wgmma and TMA, and the choice of a tile."""

import itertools

import pytest

from dsa.cute.sm90 import SHARED_BYTES
from dsa.kernels.gemm import fp8_gemm_few_rows_config as configs
from dsa.kernels.gemm import fp8_gemm_few_rows_sm90 as kernels
from dsa.kernels.gemm.grouped_tiles import PREFIX_SUMS, expected_tiles
from tests.kernels.variants import assert_counts, shipped


@shipped(kernels.compile_fp8_gemm_few_rows, kernels.compile_grouped_fp8_gemm_few_rows)
def test_sass(sass, compile_function, arguments):
    _, config = arguments
    grouped = compile_function is kernels.compile_grouped_fp8_gemm_few_rows
    accumulators = config.rows // 2 * config.span
    assert_counts(sass, QGMMA=kernels.GROUP // 32 * config.span)
    if grouped or config.ctas == 1:
        # Loads per stage: the blocks of both operands, and the scales of a. One multiply-add per accumulator: the
        # compiler has neither split nor dropped any.
        assert_counts(sass, UTMALDG=2 * config.span + 1, FFMA=accumulators)
    else:
        # Each store (ST) to another CTA's shared memory sends two accumulators.
        assert_counts(sass, UTMALDG=2 * config.span, ST=accumulators // 2)
        assert sass.instructions["UCGABAR_ARV"] and sass.instructions["UCGABAR_WAIT"]
    # wgmma descriptors are computed in uniform registers; otherwise R2UR instructions would move them there before
    # every wgmma.
    assert sass.instructions["R2UR"] < 2 * sass.instructions["QGMMA"]
    assert config.shared_bytes() + 4 * (PREFIX_SUMS + 32) * grouped <= SHARED_BYTES and config.fits()


def test_tiles_of_several_matrices_are_as_high_as_their_rows_need():
    heights = [configs.choose_grouped_config(rows, 256).rows for rows in (1, 8, 64, 1024, 4096, 8192)]
    assert heights[:3] == [8, 8, 8] and heights == sorted(heights) and heights[-1] == 32
    assert configs.choose_grouped_config(64, 2).rows == 32


@pytest.mark.parametrize(
    ("rows", "matrices", "tiles"),
    [
        (20, 1, 3),
        (1, 256, pytest.approx(1, rel=1e-2)),
        # With 256 matrices, two of six rows rarely share a matrix. With 50 rows per matrix, the last tile is half full
        # on average.
        (6, 256, pytest.approx(5.95, abs=0.05)),
        (100, 2, pytest.approx(2 * (50 / 8 + 0.5), abs=0.2)),
    ],
)
def test_expected_tiles_by_hand(rows, matrices, tiles):
    assert expected_tiles(rows, matrices, 8) * matrices == tiles


@pytest.mark.parametrize("height", [8, 16, 32])
def test_more_rows_have_no_fewer_expected_tiles(height):
    means = [expected_tiles(rows, 256, height) for rows in (1, 10, 100, 1000, 10000, 1000000)]
    assert means == sorted(means)


@pytest.mark.parametrize("columns", [8, 128, 2112, 24576])
def test_the_chosen_tile_is_no_higher_than_needed_and_has_room_for_all_blocks(columns):
    for rows, channels in itertools.product((*range(1, 65), 65, 100, 128, 512), (16, 7168, 8192, 8208, 131072)):
        config = configs.choose_config(rows, columns, channels, 132)
        assert config in configs.CONFIGS and config.rows <= max(8, 2 * rows - 1)
        assert config.ctas == 1 or channels <= configs.MAX_SPLIT_BLOCKS * kernels.GROUP
        ctas = configs.work_tiles(config, rows, columns) * config.ctas
        assert config.ctas == 1 or ctas <= 132 * config.ctas_per_sm()


# Pairs of ((rows, columns, channels) of a product, (rows, columns, CTAs) of its tile). The tile was the fastest on an
# H200 or within 2% of the fastest.
@pytest.mark.parametrize(
    ("shape", "tile"),
    [
        *(((1, 2112, 7168), (8, 32, 1)), ((16, 2112, 7168), (8, 32, 1)), ((32, 2112, 7168), (16, 64, 1))),
        *(((1, 1536, 7168), (8, 64, 4)), ((64, 1536, 7168), (16, 64, 1)), ((64, 3072, 7168), (32, 64, 1))),
        *(((1, 576, 7168), (8, 64, 8)), ((16, 576, 7168), (16, 64, 8)), ((64, 576, 7168), (16, 64, 1))),
        *(((64, 128, 7168), (16, 64, 8)), ((64, 512, 4096), (8, 32, 1)), ((64, 7168, 16384), (64, 64, 1))),
        *(((64, 4096, 8192), (32, 64, 1)), ((64, 6144, 2048), (64, 64, 1)), ((64, 12288, 6144), (32, 64, 1))),
        *(((128, 2112, 7168), (32, 64, 1)), ((128, 4096, 2048), (64, 64, 1))),
    ],
)
def test_the_tile_that_was_measured_to_be_fastest(shape, tile):
    config = configs.choose_config(*shape, 132)
    assert (config.rows, config.columns, config.ctas) == tile


@pytest.mark.parametrize("config", configs.CONFIGS)
def test_more_rows_take_no_less_time(config):
    times = [configs.microseconds(config, rows, 2112, 7168, 132) for rows in range(1, 513)]
    assert times == sorted(times) and times[0] > 0
