"""The shipped variants of the paged index scores, and of their plan, compile to sm_90a: FP8 wgmma, TMA, no spills."""

import pytest

from dsa.cute.compile_cache import cubin
from dsa.cute.sass import disassemble
from dsa.kernels import fp8_paged_mqa_logits_sm90 as kernels
from dsa.kernels import paged_mqa_logits_metadata_sm90 as metadata

# All heads, dimensions and next_n; page size and result type, which only change loads and stores, by turns.
VARIANTS = [v for _, v in kernels.shipped_variants() if (v[3], v[4]) in ((64, "float32"), (32, "bfloat16"))]


@pytest.mark.parametrize("arguments", VARIANTS, ids=str)
def test_sass(arguments):
    heads, dim, next_n, page_size, _, config = arguments
    sass = disassemble(cubin(kernels.compile_fp8_paged_mqa_logits, *arguments))
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    assert sass.instructions["QGMMA"] == dim // 32
    # Queries and every page of a tile by TMA; weights of every query and scales of every page by bulk copies.
    assert sass.instructions["UTMALDG"] == 1 + 64 // page_size
    assert sass.instructions["UBLKCP"] == next_n + 64 // page_size
    assert sass.instructions["FFMA"] == heads * next_n // 2
    assert sass.registers * config.threads <= 65536
    assert config.fits(heads * next_n)


def test_plan_sass():
    ((compile_function, arguments),) = metadata.shipped_variants()
    sass = disassemble(cubin(compile_function, *arguments))
    assert sass.stack == 0 and sass.registers <= 64
