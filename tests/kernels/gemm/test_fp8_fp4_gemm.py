"""Every shipped variant of the product with FP4 weights for many rows compiles to sm_90a: FP8 wgmma of both operands
from shared memory, TMA, FP4 widened by byte permutations, no spills, room in shared memory; and the choice among
them."""

import pytest

from dsa.kernels.gemm import fp8_fp4_gemm_config as configs
from dsa.kernels.gemm import fp8_fp4_gemm_sm90 as kernels
from dsa.kernels.gemm.fp8_gemm_config import SCALES, of_fewest_clocks
from dsa.runtime.compile_cache import cubin
from dsa.runtime.sass import disassemble
from tests.kernels.variants import shipped

STEPS = kernels.GROUP // 32


@shipped(kernels.compile_fp8_fp4_gemm)
def test_sass(arguments):
    _, config, *_ = arguments
    sass = _checked(kernels.compile_fp8_fp4_gemm, arguments, config)
    # One multiply-add an accumulator: the compiler has neither split them nor left any out.
    assert sass.instructions["FFMA"] == _products(config) * SCALES * config.columns // 2


def _products(config):
    """wgmma groups a block: of each wave, and once more where the second wave has no rows."""
    return config.waves * (config.waves + 1) // 2


def _checked(compile_function, arguments, config):
    sass = disassemble(cubin(compile_function, *arguments))
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    groups = _products(config) * SCALES
    assert sass.instructions["QGMMA"] == groups * STEPS
    # A block's wgmma are started together and waited for once: the compiler has not serialised them.
    assert sass.instructions["WARPGROUP"] == 2 * groups
    # A block: a, and b's codes by converter warp. Once: the scales of a, and both kinds of b.
    assert sass.instructions["UTMALDG"] == SCALES * (1 + kernels.CONVERTERS) + 3
    # A word of codes takes four permutations, and a unit one more for its table's place; the others are the scales'.
    units = SCALES * kernels.UNITS
    assert units * (4 * 4 + 1) <= sass.instructions["PRMT"] <= units * (4 * 4 + 1) + 40
    assert sass.registers * config.threads <= 65536
    consumers, converters, producer = kernels.REGISTERS[config.groups]
    assert config.groups * consumers + converters + producer <= sass.registers * (config.groups + 2)
    assert config.fits()
    return sass


def test_choice():
    def chosen(tokens):
        return kernels.choose_config(6 * tokens, 4096, 4096, 256, 132)

    # 16 rows an expert fill no tile of 128; 400 fill tiles of 256.
    assert chosen(700).rows == 64 and chosen(16384).rows == 256
    # 300 rows: a weight is widened for 256 of them at once.
    assert chosen(12800).rows == 256


@pytest.mark.parametrize("matrices", [1, 3])
@pytest.mark.parametrize("favourite", configs.CONFIGS)
def test_the_choice_is_by_the_clocks_that_are_given(favourite, matrices):
    """Not by those of the FP8 product, whose tiles widen nothing."""

    def tile_clocks(config, rows, blocks):
        return 1.0 if config is favourite else 1e6

    assert of_fewest_clocks(configs.CONFIGS, tile_clocks, 900, 4096, 4096, matrices, 132) is favourite


@pytest.mark.parametrize("config", configs.CONFIGS)
def test_a_work_tile_is_of_the_converters_columns(config):
    """Each converter warp has so many of them, which share one row of block scales."""
    assert config.columns == kernels.CONVERTERS * kernels.OWN_ROWS == kernels.GROUP
