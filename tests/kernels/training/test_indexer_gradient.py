"""SASS of the indexer's training kernels: wgmma in groups, and TMA."""

from dsa.kernels.training import indexer_key_grad_sm90, indexer_query_grad_sm90, indexer_scores_sm90
from dsa.kernels.training.limits import Q_TILE
from dsa.kernels.training.q_tiles import COLUMN_BLOCK
from tests.kernels.variants import assert_counts, shipped


@shipped(indexer_scores_sm90.compile_indexer_scores)
def test_scores(sass, arguments):
    _, dim, config = arguments
    # All wgmma of a tile share one arrival and one wait. One multiply-add per accumulator, and one shift for its sign.
    assert_counts(sass, HGMMA=dim // 16, WARPGROUP=2, UTMALDG=2 * (dim // 64), FFMA=config.columns // 2)
    assert sass.instructions["SHF"] >= config.columns // 2


@shipped(indexer_query_grad_sm90.compile_indexer_query_grad)
def test_query_grad(sass, arguments):
    heads, _, config = arguments
    # For each half of 128 keys: 4 wgmma and an arrival per group, and one wait for all groups.
    assert_counts(sass, HGMMA=2 * config.blocks * 4, WARPGROUP=2 * (config.blocks + 1))
    # One copy stores dI of a work tile's rows, which lie in one of a tile's two halves of 64 rows.
    assert Q_TILE // 2 * heads % (config.column_blocks * COLUMN_BLOCK) == 0


@shipped(indexer_key_grad_sm90.compile_indexer_key_grad)
def test_key_grad(sass):
    # For 64 or 128 keys: 4 wgmma and an arrival per 64 keys, and one wait.
    assert_counts(sass, HGMMA=4 + 8, WARPGROUP=2 + 3)
