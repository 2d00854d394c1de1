"""Every shipped variant of the index scores compiles to sm_90a: FP8 wgmma, TMA, no spills, room in shared memory."""

import pytest

from dsa.kernels.indexer import fp8_mqa_logits_sm90 as kernels
from dsa.runtime.compile_cache import cubin
from dsa.runtime.sass import disassemble
from tests.kernels.variants import shipped


@shipped(kernels.compile_fp8_mqa_logits)
def test_sass(arguments):
    heads, dim, _, _, _, half, config = arguments
    sass = disassemble(cubin(kernels.compile_fp8_mqa_logits, *arguments))
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    assert sass.instructions["QGMMA"] == dim // 32
    assert sass.instructions["UTMALDG"] == 2
    # One multiply-add an accumulator, or of half scores for two, and a maximum: the compiler has neither split them nor
    # left any out.
    if half:
        assert sass.instructions["HFMA2"] == sass.instructions["HMNMX2"] == config.columns // 4
        assert not sass.instructions["FFMA"]
    else:
        assert sass.instructions["FFMA"] == config.columns // 2
    assert sass.registers * config.threads <= 65536
    assert config.fits(heads, half)


@pytest.mark.parametrize("queries", [1, 4, 100, 2048, 70000])
@pytest.mark.parametrize("keys", [1, 64, 1000, 8192, 1 << 20])
def test_chunks_cover_the_keys(queries, keys):
    for heads in (8, 64):
        block_q = kernels.choose_config(heads, 128).columns // heads
        chunk, units = kernels.choose_chunk(queries, keys, block_q, 132)
        blocks = -(-queries // block_q)
        tiles = -(-keys // kernels.TILE)
        assert 1 <= chunk <= tiles and units == blocks * -(-tiles // chunk)
        # Few queries over many keys still give every multiprocessor work, in pieces of at least eight tiles.
        assert units >= min(132, blocks * (tiles // 8)) and (chunk >= 8 or tiles < 16)
