"""The shipped variants of the paged index scores, and of their plan, compile to sm_90a: FP8 wgmma, TMA, no spills."""

from dsa.kernels.indexer import fp8_paged_mqa_logits_sm90 as kernels
from dsa.kernels.indexer import paged_mqa_logits_metadata_sm90 as metadata
from dsa.kernels.indexer.limits import HEADS, NEXT_N
from dsa.runtime.compile_cache import cubin
from dsa.runtime.sass import disassemble
from tests.kernels.variants import shipped, shipped_variants_of


@shipped(kernels.compile_fp8_paged_mqa_logits)
def test_sass(arguments):
    heads, dim, next_n, page_size, _, half, config = arguments
    sass = disassemble(cubin(kernels.compile_fp8_paged_mqa_logits, *arguments))
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    assert sass.instructions["QGMMA"] == dim // 32
    # Queries and every page of a tile by TMA; weights of every query and scales of every page by bulk copies.
    assert sass.instructions["UTMALDG"] == 1 + 64 // page_size
    assert sass.instructions["UBLKCP"] == next_n + 64 // page_size
    # One multiply-add an accumulator, or of half scores for two, and a maximum.
    columns = heads * next_n
    if half:
        assert sass.instructions["HFMA2"] == sass.instructions["HMNMX2"] == columns // 4
        assert not sass.instructions["FFMA"]
    else:
        assert sass.instructions["FFMA"] == columns // 2
    assert sass.registers * config.threads <= 65536
    assert config.fits(columns, half)


def test_half_scores_are_shipped_for_more_than_128_columns():
    shapes = {(heads, next_n): False for heads in HEADS for next_n in NEXT_N}
    for _, (heads, _, next_n, _, _, half, _) in shipped_variants_of(kernels.compile_fp8_paged_mqa_logits):
        shapes[heads, next_n] |= half
    assert shapes == {(heads, next_n): heads * next_n > 128 for heads, next_n in shapes}


@shipped(metadata.compile_paged_mqa_logits_metadata)
def test_plan_sass(arguments):
    sass = disassemble(cubin(metadata.compile_paged_mqa_logits_metadata, *arguments))
    assert sass.stack == 0 and sass.registers <= 64
