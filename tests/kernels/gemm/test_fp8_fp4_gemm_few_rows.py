"""Every shipped variant of the product with FP4 weights for few rows compiles to sm_90a: FP8 wgmma with weights from
registers, several blocks' in flight, no spills, room in shared memory; and the choice among them."""

from dsa.kernels.gemm import fp8_fp4_gemm_few_rows_sm90 as kernels
from dsa.kernels.gemm.fp4_operand import ordered_place
from dsa.runtime.compile_cache import cubin
from dsa.runtime.sass import disassemble
from tests.kernels.variants import shipped


@shipped(kernels.compile_fp8_fp4_gemm_few_rows)
def test_sass(arguments):
    _, config = arguments
    sass = disassemble(cubin(kernels.compile_fp8_fp4_gemm_few_rows, *arguments))
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    steps = kernels.BLOCKS * kernels.STEPS
    assert sass.instructions["QGMMA"] == steps
    assert sass.instructions["UTMALDG"] == kernels.BOXES
    # One multiply-add an accumulator: the compiler has neither split them nor left any out.
    assert sass.instructions["FFMA"] == config.rows // 2 * kernels.BLOCKS
    # A block's wgmma are started together, and waited for at the end and where a buffer of widened weights is needed
    # again: the compiler has not serialised them.
    buffers = kernels.BLOCKS if config.resident <= 2 and config.rows <= 16 else 2
    assert sass.instructions["WARPGROUP"] == kernels.BLOCKS + kernels.BLOCKS - buffers + 2
    # Two rows of a lane: codes come four words at a time; a word takes four permutations and its table's place one.
    # Before the mainloop stands what widens the first block of all.
    words = 2 * (steps + kernels.STEPS)
    assert sass.instructions["LDSM"] == words // 4
    assert sass.instructions["PRMT"] == words * 5
    assert sass.registers * config.threads * config.resident <= 65536
    assert config.fits()


def test_words_stand_where_a_lane_has_its_neighbouring_channels():
    """Lane q of four has words q and 4 + q of a step of wgmma: those of channels 8 q to 8 q + 7."""
    places = [ordered_place(word) for word in range(32)]
    for step in range(4):
        for q in range(4):
            assert places[8 * step + 2 * q] == 8 * step + q
            assert places[8 * step + 2 * q + 1] == 8 * step + 4 + q


def test_choice():
    def chosen(tokens):
        config = kernels.choose_config(6 * tokens, 4096, 256, 132)
        return config.groups, config.rows, config.stages, config.resident

    # As measured on an H200, of V4-Flash's 256 experts and six a token: one token has few tiles, and smaller ones are
    # shared out more evenly.
    assert chosen(1) == (1, 8, 3, 3)
    assert {chosen(tokens) for tokens in (8, 32, 128)} == {(2, 8, 5, 1)}
    assert {chosen(tokens) for tokens in (256, 512)} == {(2, 16, 5, 1)}
    assert chosen(1000) == (2, 32, 4, 1)
