"""SASS of the indexer's training kernels: wgmma in groups (the compiler adds no waits), and TMA loads."""

from dsa.kernels.training import indexer_key_grad_sm90, indexer_query_grad_sm90, indexer_scores_sm90
from dsa.kernels.training.limits import Q_TILE
from dsa.kernels.training.q_tiles import COLUMN_BLOCK
from tests.kernels.variants import assert_counts, shipped


@shipped(indexer_scores_sm90.compile_indexer_scores)
def test_scores(sass, arguments):
    _, dim, config = arguments
    # All wgmma of a tile share one start and one wait (WARPGROUP). Per accumulator: one multiply-add, and one shift
    # that collects its sign bit (active_bits.py).
    assert_counts(sass, HGMMA=dim // 16, WARPGROUP=2, UTMALDG=2 * (dim // 64), FFMA=config.columns // 2)
    assert sass.instructions["SHF"] >= config.columns // 2


@shipped(indexer_query_grad_sm90.compile_indexer_query_grad)
def test_query_grad(sass, arguments):
    heads, _, config = arguments
    # Per half of a tile of 128 keys: 4 wgmma and one start per block of 64 (query, head) rows, and one wait.
    assert_counts(sass, HGMMA=2 * config.blocks * 4, WARPGROUP=2 * (config.blocks + 1))
    # One bulk copy per key tile loads dI (the gradient of the scores), and needs contiguous memory. So the queries of a
    # work tile must lie in one half of the score tile (gradients_of in q_tiles.py).
    assert Q_TILE // 2 * heads % (config.column_blocks * COLUMN_BLOCK) == 0


@shipped(indexer_key_grad_sm90.compile_indexer_key_grad)
def test_key_grad(sass):
    # There is code for 64 keys and for 128 keys. Each has 4 wgmma and one start per 64 keys, and one wait.
    assert_counts(sass, HGMMA=4 + 8, WARPGROUP=2 + 3)
