"""The grouped product with FP4 weights for many rows (prefill): its SASS, and the choice of a tile.

In the SASS, wgmma reads both operands from shared memory, and byte permutations widen FP4 to e4m3.
"""

import pytest

from dsa.kernels.gemm import fp8_fp4_gemm_sm90 as kernels
from dsa.kernels.gemm.fp8_gemm_config import SCALES, of_fewest_clocks
from tests.kernels.variants import assert_counts, shipped


@shipped(kernels.compile_fp8_fp4_gemm)
def test_sass(sass, arguments):
    _, config, *_ = arguments
    # One wgmma group per block and wave. With two waves, there is separate code for work tiles without rows in the
    # second wave. It repeats the first wave's groups.
    groups = config.waves * (config.waves + 1) // 2 * SCALES
    # Two WARPGROUP per wgmma group: its start and its wait. More would mean that the compiler has serialised the wgmma.
    assert_counts(sass, QGMMA=groups * kernels.GROUP // 32, WARPGROUP=2 * groups)
    # One multiply-add per accumulator of each group: the compiler has neither split nor dropped any.
    assert_counts(sass, FFMA=groups * config.columns // 2)
    # Per block: a, and b's codes for each converter warp. 3 more per SCALES blocks: the scales of a, and both kinds of
    # scales of b.
    assert_counts(sass, UTMALDG=SCALES * (1 + kernels.CONVERTERS) + 3)
    # A unit has four words of codes. It needs four permutations per word, and one for a table offset. Up to 40 more
    # compute the offsets from the scales.
    permutations = SCALES * kernels.UNITS * (4 * 4 + 1)
    assert permutations <= sass.instructions["PRMT"] <= permutations + 40
    consumers, converters, producer = kernels.REGISTERS[config.groups]
    assert config.groups * consumers + converters + producer <= sass.registers * (config.groups + 2)
    assert config.fits()


@pytest.mark.parametrize(("tokens", "rows"), [(700, 64), (12800, 256), (16384, 256)])
def test_tiles_are_as_high_as_the_rows_of_an_expert(tokens, rows):
    """A token selects six of 256 experts, so there are about 16, 300 and 384 rows per expert."""
    assert kernels.choose_config(6 * tokens, 4096, 4096, 256, 132).rows == rows


@pytest.mark.parametrize("matrices", [1, 3])
@pytest.mark.parametrize("favourite", kernels.CONFIGS)
def test_the_choice_uses_the_given_clocks(favourite, matrices):
    """The FP8 product's cost function would be wrong here, because that product does not widen FP4 weights."""

    def tile_clocks(config, rows, blocks):
        return 1.0 if config is favourite else 1e6

    assert of_fewest_clocks(kernels.CONFIGS, tile_clocks, 900, 4096, 4096, matrices, 132) is favourite


@pytest.mark.parametrize("config", kernels.CONFIGS)
def test_a_work_tile_has_the_columns_of_the_converter_warps(config):
    """The columns of a work tile share one row of block scales."""
    assert config.columns == kernels.CONVERTERS * kernels.OWN_ROWS == kernels.GROUP
