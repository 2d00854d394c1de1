"""Every shipped variant of scores and selection in one compiles to sm_90a: FP8 wgmma, TMA, no spills, room in shared
memory; and lists have room for what comes between two cuts."""

from dsa.kernels.indexer import indexer_select_sm90 as kernels
from dsa.kernels.indexer.select_limits import MAX_SELECTED
from dsa.runtime.compile_cache import cubin
from dsa.runtime.sass import disassemble
from tests.kernels.variants import shipped


@shipped(kernels.compile_indexer_select)
def test_sass(arguments):
    heads, dim, half, config = arguments
    sass = disassemble(cubin(kernels.compile_indexer_select, *arguments))
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    assert sass.instructions["QGMMA"] == dim // 32
    assert sass.instructions["UTMALDG"] == 2
    if half:
        assert sass.instructions["HFMA2"] == sass.instructions["HMNMX2"] == kernels.BLOCK_Q * heads // 4
        assert not sass.instructions["FFMA"]
    else:
        assert sass.instructions["FFMA"] == kernels.BLOCK_Q * heads // 2
    # Launched behind the kernel before, and waits for it.
    assert sass.instructions["ACQBULK"] and sass.instructions["PREEXIT"]
    assert sass.registers * (kernels.GROUPS + 1) * 128 <= 65536
    assert config.fits(heads, dim)


def test_a_cut_list_has_room():
    """For a third as many keys as it keeps, beside the next tile, before it is cut again."""
    left = MAX_SELECTED + kernels.SLACK
    assert kernels.CAPACITY - kernels.TILE - left >= MAX_SELECTED // 3
