"""SASS of every FP8 GEMM variant, plain and with SwiGLU: FP8 wgmma, TMA or cp.async gathers, an atomic for dynamic
scheduling, no spills, shared memory that fits. Also the choice of a config by shape."""

import itertools

import pytest

from dsa.cute.quantize import GROUP
from dsa.kernels.gemm import fp8_gemm_config as configs
from dsa.kernels.gemm import fp8_gemm_sm90 as kernels
from dsa.kernels.gemm import limits
from dsa.kernels.gemm.swiglu_epilogue import SwigluEpilogue
from dsa.runtime.compile_cache import cubin
from dsa.runtime.sass import disassemble
from tests.kernels.variants import shipped

STEPS = GROUP // 32
BIG = configs.CONFIGS[-2:]


@shipped(kernels.compile_fp8_gemm)
def test_sass_of_one_matrix(arguments):
    dtype, config = arguments
    sass = checked(kernels.compile_fp8_gemm, arguments, config, gathered=False, drawn=False, parts=1)
    assert sass.instructions["FFMA"] == products(config) * config.columns * configs.SCALES // 2
    chunks = config.columns // configs.CHUNK
    assert sass.instructions["UTMASTG"] == (chunks if dtype != "float32" and config.has_room else 0)
    # Once, when the mbarriers have been made: nothing is counted.
    assert sass.instructions["BAR"] == 1


@shipped(kernels.compile_grouped_fp8_gemm)
def test_sass(arguments):
    dtype, config, gathered, _, drawn = arguments
    sass = checked(kernels.compile_grouped_fp8_gemm, arguments, config, gathered, drawn, parts=1)
    # One multiply-add an accumulator: the compiler has neither split them nor left any out.
    multiplied = products(config) * config.columns + sum(turned_counts(config, drawn))
    assert sass.instructions["FFMA"] == multiplied * configs.SCALES // 2
    # TMA stores what a warp has shared memory for, of both waves.
    chunks = config.columns // configs.CHUNK
    by_tma = dtype != "float32" and config.chunks >= chunks * config.waves
    assert sass.instructions["UTMASTG"] == (chunks if by_tma else 0)


@shipped(kernels.compile_fp8_gemm_swiglu)
def test_sass_of_swiglu(arguments):
    *_, config, gathered, drawn = arguments
    sass = checked(kernels.compile_fp8_gemm_swiglu, arguments, config, gathered, drawn, parts=2)
    multiplied = products(config, 2) * GROUP + 2 * sum(turned_counts(config, drawn))
    assert sass.instructions["FFMA"] >= multiplied * configs.SCALES // 2
    assert config.columns == 2 * GROUP and config.waves == 1
    assert config.chunks * configs.CHUNK_BYTES >= SwigluEpilogue.warp_bytes


def products(config, parts=1):
    """Of a block: of each wave or part, and once more of the first wave, where the second has no rows."""
    return config.waves * (config.waves + 1) // 2 * parts


def turned_counts(config, drawn):
    """Columns of the wgmma of turned work tiles."""
    turned = drawn and config in (*configs.TURNED_CONFIGS, configs.SWIGLU_CONFIGS[-1])
    return configs.TURNED_COUNTS if turned else ()


def checked(compile_function, arguments, config, gathered, drawn, parts):
    """The machine code, after what all variants have in common."""
    sass = disassemble(cubin(compile_function, *arguments))
    found = sass.instructions
    assert sass.stack == 0 and not found["STL"] and not found["LDL"]
    turned = len(turned_counts(config, drawn))
    groups = (products(config, parts) + turned * parts) * configs.SCALES
    assert found["QGMMA"] == groups * STEPS
    # A block's wgmma are started together and waited for once: the compiler has not serialised them.
    assert found["WARPGROUP"] == 2 * groups
    # Four blocks: of b each part, and the scales of two blocks of its rows; of a them and their scales. Where a is
    # gathered both roles of the producer warpgroup have a copy for 16 rows of a block, and one for the scales.
    boxes = config.rows // kernels.BOX_ROWS if turned else 1
    of_a = 0 if gathered else configs.SCALES * boxes + 1
    assert found["UTMALDG"] == configs.SCALES * parts + kernels.SCALE_BLOCKS + of_a
    assert found["LDGSTS"] == (2 * (configs.SCALES * config.rows // 16 + 1) if gathered else 0)
    assert found["ATOMG"] == (1 if drawn else 0)
    assert sass.registers * config.threads <= 65536
    consumer, producer = kernels.REGISTERS[2] if gathered else kernels.LOADING_REGISTERS
    assert config.groups * consumer + producer <= sass.registers * (config.groups + 1)
    assert config.fits()
    return sass


@pytest.mark.parametrize(
    "config", dict.fromkeys((*configs.CONFIGS, *configs.ONE_MATRIX_CONFIGS, *configs.SWIGLU_CONFIGS))
)
def test_shared_memory_holds_each(config):
    deeper = configs.Fp8GemmConfig(config.groups, config.waves, config.columns, config.stages + 2, config.chunks)
    assert config.fits() and not deeper.fits()


ROWS = (1, 2, 7, 8, 63, 64, 65, 100, 128, 192, 256, 300, 1000, 1024, 2500, 4096, 16384, 131072, limits.MAX_ROWS)


@pytest.mark.parametrize("among", ["CONFIGS", "GATHERING_CONFIGS", "SWIGLU_CONFIGS"])
@pytest.mark.parametrize("matrices", [1, 2, 8, 256, limits.MAX_MATRICES])
def test_every_shape_gets_one_of_those_that_there_are(matrices, among):
    allowed = getattr(configs, among)
    for rows in ROWS:
        for columns in (8, 128, 136, 576, 2112, 4096, 24576):
            for channels in (16, 128, 1536, 7168, 18432):
                for multiprocessors in (1, 78, 132):
                    sizes = rows, columns, channels, matrices, multiprocessors
                    assert configs.choose_config(*sizes, allowed) in allowed
                    assert configs.choose_drawn_config(*sizes) in configs.DRAWN_CONFIGS
    # One that has to be: where all are for more rows than a matrix has.
    assert configs.choose_config(matrices, 4096, 7168, matrices, 132, allowed[-1:]) is allowed[-1]


@pytest.mark.parametrize("among", ["CONFIGS", "GATHERING_CONFIGS", "SWIGLU_CONFIGS"])
@pytest.mark.parametrize("matrices", [1, 8, 256, 1024])
def test_few_rows_of_a_matrix_get_low_tiles(matrices, among):
    """128 rows and more have the products of what is not there, or wait for it."""
    for each in (1, 8, 64):
        for columns in (128, 4096, 24576):
            config = configs.choose_config(each * matrices, columns, 7168, matrices, 132, getattr(configs, among))
            assert config.rows == 64
    # Fewer rows than matrices: some have one, the others none.
    assert configs.choose_config(3, 4096, 7168, matrices, 132, getattr(configs, among)).rows == 64


@pytest.mark.parametrize("columns, channels", [(4096, 7168), (7168, 2048), (24576, 1536), (32768, 512), (2112, 7168)])
def test_many_rows_get_big_tiles(columns, channels):
    for rows, matrices in ((8192, 1), (16384, 1), (131072, 1), (131072, 256), (65536, 8)):
        assert configs.choose_config(rows, columns, channels, matrices, 132) in BIG
        swiglu = configs.choose_config(rows, columns, channels, matrices, 132, configs.SWIGLU_CONFIGS)
        gathering = configs.choose_config(rows, columns, channels, matrices, 132, configs.GATHERING_CONFIGS)
        assert swiglu.rows == gathering.rows == 128


@pytest.mark.parametrize("multiprocessors", [1, 78, 132])
def test_every_shape_of_one_matrix_gets_a_tile_of_its_own(multiprocessors):
    for rows, columns in itertools.product(ROWS, (8, 128, 136, 576, 2112, 4096, 24576)):
        for channels in (16, 128, 1536, 7168, 18432):
            config = configs.choose_one_config(rows, columns, channels, multiprocessors)
            assert config in configs.ONE_MATRIX_CONFIGS
            assert configs.microseconds_of_one(config, rows, columns, channels, multiprocessors) > 0


@pytest.mark.parametrize("columns, channels", [(4096, 7168), (7168, 2048), (24576, 1536), (32768, 512), (2112, 7168)])
def test_many_rows_of_one_matrix_get_big_tiles(columns, channels):
    for rows in (8192, 16384, 131072):
        assert configs.choose_one_config(rows, columns, channels, 132) in BIG


# What was fastest, or within 2% of it, of all tiles measured on an H200: (rows, columns) of a tile.
@pytest.mark.parametrize(
    ("shape", "tile"),
    [
        *(((64, 12288, 6144), (64, 96)), ((64, 65536, 1536), (64, 128)), ((64, 24576, 1536), (64, 192))),
        *(((64, 6144, 2048), (64, 48)), ((64, 18432, 7168), (64, 48)), ((64, 6144, 12288), (64, 48))),
        *(((64, 32768, 1024), (64, 128)), ((64, 28672, 512), (64, 128)), ((64, 7168, 2048), (64, 64))),
        *(((128, 3072, 7168), (64, 48)), ((128, 4096, 2048), (64, 64)), ((128, 4096, 8192), (64, 64))),
        *(((128, 7168, 2048), (64, 128)), ((128, 8192, 1024), (64, 128)), ((128, 24576, 1536), (128, 192))),
        *(((256, 1536, 7168), (64, 48)), ((256, 2112, 7168), (64, 64)), ((256, 4096, 8192), (128, 64))),
        *(((512, 1024, 4096), (64, 64)), ((512, 32768, 1024), (128, 128)), ((1024, 32768, 512), (128, 128))),
    ],
)
def test_the_tile_of_one_matrix_that_was_measured_to_be_fastest(shape, tile):
    config = configs.choose_one_config(*shape, 132)
    assert (config.rows, config.columns) == tile


def test_more_rows_take_no_fewer_clocks():
    for config in (*configs.CONFIGS, *configs.SWIGLU_CONFIGS):
        clocks = [configs.tile_clocks(config, rows, 56) for rows in range(1, config.rows + 1)]
        assert clocks == sorted(clocks) and clocks[0] > 0


def test_a_scale_is_of_as_many_channels_as_the_casts_give():
    assert limits.GROUP == GROUP
