"""Every shipped variant of the FP8 product of few rows compiles to sm_90a: FP8 wgmma, TMA, no spills, room in shared
memory."""

import itertools

import pytest

from dsa.cute.compile_cache import cubin
from dsa.cute.sass import disassemble
from dsa.kernels.gemm import few_rows_tile
from dsa.kernels.gemm import fp8_gemm_few_rows_sm90 as kernels
from tests.kernels.variants import shipped


@shipped(kernels.compile_fp8_gemm_few_rows)
def test_sass(arguments):
    _, config = arguments
    sass = disassemble(cubin(kernels.compile_fp8_gemm_few_rows, *arguments))
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    assert sass.instructions["QGMMA"] == kernels.GROUP // 32 * config.span
    accumulators = config.rows // 2 * config.span
    if config.ctas == 1:
        # Of a stage: its blocks of both operands, and the scales of a's.
        assert sass.instructions["UTMALDG"] == 2 * config.span + 1
        # One multiply-add an accumulator: the compiler has neither split them nor left any out.
        assert sass.instructions["FFMA"] == accumulators
    else:
        assert sass.instructions["UTMALDG"] == 2 * config.span
        # Two accumulators a store to shared memory of the cluster.
        assert sass.instructions["ST"] == accumulators // 2
        assert sass.instructions["UCGABAR_ARV"] and sass.instructions["UCGABAR_WAIT"]
    assert sass.registers * few_rows_tile.THREADS <= 65536
    assert config.fits()


@pytest.mark.parametrize("columns", [8, 128, 2112, 24576])
def test_the_chosen_tile_has_all_rows_and_room_for_all_blocks(columns):
    for rows, channels in itertools.product(range(1, 65), (16, 7168, 8192, 8208, 131072)):
        config = kernels.choose_config(rows, columns, channels, 132)
        assert rows <= config.rows and config in kernels.CONFIGS
        assert config.ctas == 1 or channels <= few_rows_tile.MAX_SPLIT_BLOCKS * kernels.GROUP
