"""The index scores: SASS with FP8 wgmma and TMA, and the division of the key tiles into chunks."""

import pytest

from dsa.kernels.indexer import fp8_mqa_logits_sm90 as kernels
from tests.kernels.indexer.score_products import check_products
from tests.kernels.variants import assert_counts, shipped


@shipped(kernels.compile_fp8_mqa_logits)
def test_sass(sass, arguments):
    heads, dim, _, _, _, half, config = arguments
    check_products(sass, dim, config.columns, half)
    assert_counts(sass, UTMALDG=2)
    assert config.fits(heads, half)


@pytest.mark.parametrize("queries", [1, 4, 100, 2048, 70000])
@pytest.mark.parametrize("keys", [1, 64, 1000, 8192, 1 << 20])
@pytest.mark.parametrize("heads", [8, 64])
def test_chunks_cover_the_keys(heads, queries, keys):
    block_q = kernels.choose_config(heads, 128).columns // heads
    chunk, units = kernels.choose_chunk(queries, keys, block_q, 132)
    blocks, tiles = -(-queries // block_q), -(-keys // kernels.TILE)
    assert 1 <= chunk <= tiles and units == blocks * -(-tiles // chunk)
    assert units >= min(132, blocks * (tiles // 8)) and (chunk >= 8 or tiles < 16)
