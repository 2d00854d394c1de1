"""The kernels for the indexer's candidate passes (candidate_lists.py): their SASS, the key tiles that each pass scores,
and the room in the candidate lists."""

import itertools
import math

import pytest

from dsa.kernels.indexer import candidate_bounds_sm90, candidate_lists, candidate_scores_sm90, candidate_select_sm90
from dsa.kernels.indexer.limits import MAX_SELECTED, TWO_OPS_KEYS
from tests.kernels.indexer.score_products import check_products
from tests.kernels.variants import assert_counts, shipped

SIZES = [TWO_OPS_KEYS + 1, 12345, 24576, 32768, 65536, 131072, 2**19, 2**20 + 1, 2**24, candidate_lists.MAX_KEYS - 1]


@shipped(candidate_scores_sm90.compile_candidate_scores)
def test_scores(sass, arguments):
    heads, dim, sample, half, config = arguments
    check_products(sass, dim, config.columns, half)
    assert sass.instructions["UTMALDG"] >= 1 + candidate_lists.PARTS
    # A lane has scores for a quarter of the tile's queries. It appends candidates of a query with one atomic. The
    # atomics exist twice: in the loop over key tiles, and after it.
    assert_counts(sass, ATOMS=0 if sample else config.columns // heads // 2)


@shipped(candidate_bounds_sm90.compile_candidate_bounds)
def test_bounds(sass, arguments):
    kernel = candidate_bounds_sm90.CandidateBoundsSm90(*arguments)
    assert sass.registers * kernel.threads * kernel.ctas <= 65536


@shipped(candidate_select_sm90.compile_candidate_select)
def test_selection(sass):
    assert sass.registers * candidate_select_sm90.THREADS * candidate_select_sm90.CTAS <= 65536


@pytest.mark.parametrize("keys", SIZES)
def test_passes_read_all_tiles_once(keys):
    """The first pass has room for all its scores."""
    strides = candidate_lists.pass_strides(keys)
    assert strides[-1] == 1
    for stride, following in itertools.pairwise(strides):
        assert stride % following == 0 and stride // following >= 4
    tiles = math.ceil((keys // candidate_lists.GROUP + 2) / candidate_lists.PARTS)
    assert math.ceil(tiles / strides[0]) <= candidate_lists.SAMPLE_TILES
    assert candidate_lists.SAMPLES <= 2 * candidate_lists.CAPACITY


@pytest.mark.parametrize("keys", SIZES)
@pytest.mark.parametrize("k", [1, 64, 512, MAX_SELECTED])
def test_bounds_leave_enough_and_not_too_many(k, keys):
    """If scores are independent and counts stay within 5 standard deviations, a bound leaves at least k keys. They fit
    in the lists of the next pass."""
    strides = candidate_lists.pass_strides(keys)
    ranks = candidate_lists.bound_ranks(k, strides)
    for rank, (stride, following) in zip(ranks, itertools.pairwise(strides), strict=True):
        assert rank >= k / stride + 5 * math.sqrt(k / stride)
        assert (rank + 5 * math.sqrt(rank)) * stride / following <= candidate_lists.CAPACITY


def test_two_ctas_share_a_block():
    for queries, block_q, sms in itertools.product((1, 5, 263, 264, 265, 529, 4096), (4, 16), (1, 7, 132)):
        blocks, ctas = -(-queries // block_q), candidate_lists.choose_ctas(queries, block_q, sms)
        assert ctas == 2 * blocks or 1 <= ctas <= min(blocks, sms)


def test_the_lists_of_a_query_take_at_most_32_kib():
    """The terms in bytes: the candidates, two counts, the bound, and the number of keys left to select."""
    assert 8 * candidate_lists.CAPACITY + 8 + 4 + 4 <= 32 * 1024
