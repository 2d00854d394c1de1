"""SASS of the paged index scores and of their plan (the division of keys among SMs): FP8 wgmma, TMA and bulk copies."""

from dsa.kernels.indexer import fp8_paged_mqa_logits_sm90 as kernels
from dsa.kernels.indexer import paged_mqa_logits_metadata_sm90 as metadata
from dsa.kernels.indexer.limits import HEADS, NEXT_N
from tests.kernels.indexer.score_products import check_products
from tests.kernels.variants import assert_counts, shipped, shipped_variants_of


@shipped(kernels.compile_fp8_paged_mqa_logits)
def test_sass(sass, arguments):
    heads, dim, next_n, page_size, _, half, config = arguments
    columns, pages = heads * next_n, 64 // page_size
    check_products(sass, dim, columns, half)
    # TMA loads the queries and the pages of a tile; bulk copies load each query's weights and each page's scales.
    assert_counts(sass, UTMALDG=1 + pages, UBLKCP=next_n + pages)
    assert config.fits(columns, half)


def test_fp16_scores_are_shipped_for_more_than_128_columns():
    shapes = {(heads, next_n): False for heads in HEADS for next_n in NEXT_N}
    for _, (heads, _, next_n, _, _, half, _) in shipped_variants_of(kernels.compile_fp8_paged_mqa_logits):
        shapes[heads, next_n] |= half
    assert shapes == {(heads, next_n): heads * next_n > 128 for heads, next_n in shapes}


@shipped(metadata.compile_paged_mqa_logits_metadata)
def test_plan_sass(sass):
    assert sass.registers <= 64
