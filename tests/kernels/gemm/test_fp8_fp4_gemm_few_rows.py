"""The grouped product with FP4 weights for few rows (decode): its SASS, and the choice of a tile.

In the SASS, wgmma reads the weights from registers, and the wgmma of several blocks are in flight.
"""

import pytest

from dsa.kernels.gemm import fp8_fp4_gemm_few_rows_sm90 as kernels
from dsa.kernels.gemm.fp4_operand import ordered_place
from tests.kernels.variants import assert_counts, shipped


@shipped(kernels.compile_fp8_fp4_gemm_few_rows)
def test_sass(sass, arguments):
    _, config = arguments
    steps = kernels.BLOCKS * kernels.STEPS
    assert_counts(sass, QGMMA=steps, UTMALDG=kernels.BOXES)
    # One multiply-add per accumulator of a stage's four blocks: the compiler has neither split nor dropped any.
    assert_counts(sass, FFMA=config.rows // 2 * kernels.BLOCKS)
    # WARPGROUP per stage: one start per block, and a wait before each reuse of a buffer of widened weights. The 2
    # others: a wait for the next stage's first block, and a wait at the end. More would mean that the compiler has
    # serialised the wgmma.
    buffers = kernels.BLOCKS if config.resident <= 2 and config.rows <= 16 else 2
    assert_counts(sass, WARPGROUP=kernels.BLOCKS + kernels.BLOCKS - buffers + 2)
    # A lane has two words of codes per wgmma. The code before the mainloop widens the first block. An LDSM loads four
    # words. A word needs four permutations, and one for its table's offset.
    words = 2 * (steps + kernels.STEPS)
    assert_counts(sass, LDSM=words // 4, PRMT=words * 5)
    assert sass.registers * config.threads * config.resident <= 65536
    assert config.fits()


def test_a_lane_finds_its_words_where_its_neighbouring_channels_are():
    """wgmma expects words q and 4 + q of a step in lane q (0 to 3). In the stored order, these two words contain the
    adjacent channels 8 q to 8 q + 7 (see fp4_operand.py)."""
    places = [ordered_place(word) for word in range(32)]
    assert places == [8 * step + word for step in range(4) for q in range(4) for word in (q, 4 + q)]


@pytest.mark.parametrize(
    ("tokens", "tile"),
    [
        (1, (1, 8, 3, 3)),  # one token has few tiles: smaller tiles are distributed more evenly
        *((tokens, (2, 8, 5, 1)) for tokens in (8, 32, 128)),
        *((tokens, (2, 16, 5, 1)) for tokens in (256, 512)),
        (1000, (2, 32, 4, 1)),
    ],
)
def test_the_choice_is_what_was_measured_on_an_h200(tokens, tile):
    """In V4-Flash, a token selects six of 256 experts."""
    config = kernels.choose_config(6 * tokens, 4096, 256, 132)
    assert (config.groups, config.rows, config.stages, config.resident) == tile
