"""Scores and selection in one kernel: SASS with FP8 wgmma and TMA, and the capacity of the candidate lists."""

from dsa.kernels.indexer import indexer_select_sm90 as kernels
from dsa.kernels.indexer.limits import MAX_SELECTED
from tests.kernels.indexer.score_products import check_products
from tests.kernels.variants import assert_counts, shipped


@shipped(kernels.compile_indexer_select)
def test_sass(sass, arguments):
    heads, dim, half, config = arguments
    check_products(sass, dim, kernels.BLOCK_Q * heads, half)
    assert_counts(sass, UTMALDG=2)
    assert config.fits(heads, dim)


def test_a_pruned_list_has_room():
    """A pruned list keeps up to MAX_SELECTED + SLACK keys. It has room for one tile and MAX_SELECTED / 3 more."""
    kept = MAX_SELECTED + kernels.SLACK
    assert kernels.CAPACITY - kernels.TILE - kept >= MAX_SELECTED // 3
