"""The FP8 products for many rows, plain and with SwiGLU: their SASS, and the choice of a tile by shape.

The SASS has FP8 wgmma, TMA loads or cp.async gathers, and with dynamic scheduling one atomic.
"""

import itertools

import pytest

from dsa.cute.quantize import GROUP
from dsa.kernels.gemm import fp8_gemm_config as configs
from dsa.kernels.gemm import fp8_gemm_sm90 as kernels
from dsa.kernels.gemm import limits
from dsa.kernels.gemm.swiglu_epilogue import SwigluEpilogue
from tests.kernels.variants import assert_counts, shipped

BIG = configs.CONFIGS[-2:]


@shipped(kernels.compile_fp8_gemm)
def test_sass_of_one_matrix(sass, arguments):
    dtype, config = arguments
    check_mainloop(sass, config, gathered=False, dynamic=False, parts=1)
    assert_counts(sass, FFMA=products(config) * config.columns * configs.SCALES // 2)
    by_tma = dtype != "float32" and config.has_room
    assert_counts(sass, UTMASTG=config.columns // configs.CHUNK if by_tma else 0)
    assert_counts(sass, BAR=1)  # the barrier after the initialisation of the mbarriers


@shipped(kernels.compile_grouped_fp8_gemm)
def test_sass(sass, arguments):
    dtype, config, gathered, _, dynamic = arguments
    check_mainloop(sass, config, gathered, dynamic, parts=1)
    # One multiply-add per accumulator of each block of channels: the compiler has neither split nor dropped any.
    columns = products(config) * config.columns + sum(swapped_counts(config, dynamic))
    assert_counts(sass, FFMA=columns * configs.SCALES // 2)
    # TMA stores 16-bit results if a warp has shared memory for the chunks of all waves.
    chunks = config.columns // configs.CHUNK
    by_tma = dtype != "float32" and config.chunks >= chunks * config.waves
    assert_counts(sass, UTMASTG=chunks if by_tma else 0)


@shipped(kernels.compile_fp8_gemm_swiglu)
def test_sass_of_swiglu(sass, arguments):
    *_, config, gathered, dynamic = arguments
    check_mainloop(sass, config, gathered, dynamic, parts=2)
    columns = products(config, 2) * GROUP + 2 * sum(swapped_counts(config, dynamic))
    assert sass.instructions["FFMA"] >= columns * configs.SCALES // 2
    assert config.columns == 2 * GROUP and config.waves == 1
    assert config.chunks * configs.CHUNK_BYTES >= SwigluEpilogue.warp_bytes


def products(config, parts=1):
    """Return the number of wgmma groups in the code for a block of channels. With two waves, there is separate code for
    work tiles without rows in the second wave. It repeats the first wave's groups.

    parts: 2 for SwiGLU (gate and up projection), else 1.
    """
    return config.waves * (config.waves + 1) // 2 * parts


def swapped_counts(config, dynamic):
    """Return the wgmma widths (N) for which the kernel contains code that swaps A and B."""
    swapped = dynamic and config in (*configs.SWAP_AB_CONFIGS, configs.SWIGLU_CONFIGS[-1])
    return configs.SWAP_AB_COUNTS if swapped else ()


def check_mainloop(sass, config, gathered, dynamic, parts):
    swapped = len(swapped_counts(config, dynamic))
    groups = (products(config, parts) + swapped * parts) * configs.SCALES
    # Two WARPGROUP per wgmma group: its start and its wait. More would mean that the compiler has serialised the wgmma.
    assert_counts(sass, QGMMA=groups * GROUP // 32, WARPGROUP=2 * groups, ATOMG=int(dynamic))
    # Loads per SCALES blocks: each part of b, b's scales, a, and a's scales. The code that gathers a exists twice: for
    # the first producer warp, and for the other three. It has one copy per 16 rows of a block, and one for the scales.
    boxes = config.rows // kernels.BOX_ROWS if swapped else 1
    copies_of_a = 0 if gathered else configs.SCALES * boxes + 1
    gathers = 2 * (configs.SCALES * config.rows // 16 + 1) if gathered else 0
    assert_counts(sass, UTMALDG=configs.SCALES * parts + kernels.SCALE_BLOCKS + copies_of_a, LDGSTS=gathers)
    consumer, producer = kernels.REGISTERS[2] if gathered else kernels.LOADING_REGISTERS
    assert config.groups * consumer + producer <= sass.registers * (config.groups + 1)
    assert config.fits()


@pytest.mark.parametrize(
    "config", dict.fromkeys((*configs.CONFIGS, *configs.ONE_MATRIX_CONFIGS, *configs.SWIGLU_CONFIGS))
)
def test_shared_memory_holds_no_deeper_pipeline(config):
    deeper = configs.Fp8GemmConfig(config.groups, config.waves, config.columns, config.stages + 2, config.chunks)
    assert config.fits() and not deeper.fits()


ROWS = (1, 2, 7, 8, 63, 64, 65, 100, 128, 192, 256, 300, 1000, 1024, 2500, 4096, 16384, 131072, limits.MAX_ROWS)
COLUMNS, CHANNELS = (8, 128, 136, 576, 2112, 4096, 24576), (16, 128, 1536, 7168, 18432)
LARGE = [(4096, 7168), (7168, 2048), (24576, 1536), (32768, 512), (2112, 7168)]
among_configs = pytest.mark.parametrize(
    "among", [configs.CONFIGS, configs.GATHERING_CONFIGS, configs.SWIGLU_CONFIGS], ids=["plain", "gathered", "swiglu"]
)


@among_configs
@pytest.mark.parametrize("matrices", [1, 2, 8, 256, limits.MAX_MATRICES])
def test_every_shape_gets_one_of_the_allowed_tiles(matrices, among):
    for rows, columns, channels, sms in itertools.product(ROWS, COLUMNS, CHANNELS, (1, 78, 132)):
        sizes = rows, columns, channels, matrices, sms
        assert configs.choose_config(*sizes, among) in among
        assert configs.choose_dynamic_config(*sizes) in configs.DYNAMIC_CONFIGS
    assert configs.choose_config(matrices, 4096, 7168, matrices, 132, among[-1:]) is among[-1]


@among_configs
@pytest.mark.parametrize("matrices", [1, 8, 256, 1024])
def test_few_rows_per_matrix_get_low_tiles(matrices, among):
    for rows, columns in itertools.product((matrices, 8 * matrices, 64 * matrices), (128, 4096, 24576)):
        assert configs.choose_config(rows, columns, 7168, matrices, 132, among).rows == 64
    assert configs.choose_config(3, 4096, 7168, matrices, 132, among).rows == 64


@pytest.mark.parametrize("columns, channels", LARGE)
def test_many_rows_get_big_tiles(columns, channels):
    for rows, matrices in ((8192, 1), (16384, 1), (131072, 1), (131072, 256), (65536, 8)):
        sizes = rows, columns, channels, matrices, 132
        assert configs.choose_config(*sizes) in BIG
        assert configs.choose_config(*sizes, configs.SWIGLU_CONFIGS).rows == 128
        assert configs.choose_config(*sizes, configs.GATHERING_CONFIGS).rows == 128
        assert matrices > 1 or configs.choose_one_config(rows, columns, channels, 132) in BIG


@pytest.mark.parametrize("sms", [1, 78, 132])
def test_every_shape_of_one_matrix_gets_one_of_its_tiles(sms):
    for sizes in itertools.product(ROWS, COLUMNS, CHANNELS):
        config = configs.choose_one_config(*sizes, sms)
        assert config in configs.ONE_MATRIX_CONFIGS and configs.microseconds_of_one(config, *sizes, sms) > 0


# Pairs of ((rows, columns, channels) of a product, (rows, columns) of its tile). The tile was the fastest on an H200 or
# within 2% of the fastest.
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


@pytest.mark.parametrize("config", dict.fromkeys((*configs.CONFIGS, *configs.SWIGLU_CONFIGS)))
def test_more_rows_take_no_fewer_clocks(config):
    clocks = [configs.tile_clocks(config, rows, 56) for rows in range(1, config.rows + 1)]
    assert clocks == sorted(clocks) and clocks[0] > 0


def test_a_scale_has_as_many_channels_as_the_casts_give():
    assert limits.GROUP == GROUP
