"""Passes of scores that keep candidates, their bounds and the selection from lists: what compiles to sm_90a, and which
keys the passes have."""

import itertools
import math

import pytest

from dsa.kernels.indexer import candidate_bounds_sm90, candidate_lists, candidate_scores_sm90, candidate_select_sm90
from dsa.kernels.indexer.select_limits import MAX_SELECTED, TWO_OPS_KEYS
from dsa.runtime.compile_cache import cubin
from dsa.runtime.sass import disassemble
from tests.kernels.variants import shipped

SIZES = [TWO_OPS_KEYS + 1, 12345, 24576, 32768, 65536, 131072, 2**19, 2**20 + 1, 2**24, candidate_lists.MAX_KEYS - 1]


@shipped(candidate_scores_sm90.compile_candidate_scores)
def test_scores(arguments):
    heads, dim, sample, half, config = arguments
    sass = disassemble(cubin(candidate_scores_sm90.compile_candidate_scores, *arguments))
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    assert sass.instructions["QGMMA"] == dim // 32
    assert sass.instructions["UTMALDG"] >= 1 + candidate_lists.PARTS
    if half:
        assert sass.instructions["HFMA2"] == sass.instructions["HMNMX2"] == config.columns // 4
        assert not sass.instructions["FFMA"]
    else:
        assert sass.instructions["FFMA"] == config.columns // 2
    # One for each of a lane's queries, in the loop and behind it.
    assert sass.instructions["ATOMS"] == (0 if sample else config.columns // heads // 2)
    assert sass.registers * config.threads <= 65536


@shipped(candidate_bounds_sm90.compile_candidate_bounds, candidate_select_sm90.compile_candidate_select)
def test_bounds_and_selection(compile_function, arguments):
    sass = disassemble(cubin(compile_function, *arguments))
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    threads = candidate_select_sm90.THREADS, candidate_select_sm90.CTAS
    if compile_function is candidate_bounds_sm90.compile_candidate_bounds:
        kernel = candidate_bounds_sm90.CandidateBoundsSm90(*arguments)
        threads = kernel.threads, kernel.ctas
    assert sass.registers * math.prod(threads) <= 65536


@pytest.mark.parametrize("keys", SIZES)
def test_passes_have_all_tiles_once(keys):
    """Every stride divides the one before by more than there are consumer warpgroups, and the sample has room."""
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
    """In standard deviations of a count of independent scores, 5 from a bound above the k-th largest, and 5 from a list
    that overflows in the next pass."""
    strides = candidate_lists.pass_strides(keys)
    for rank, (stride, following) in zip(
        candidate_lists.bound_ranks(k, strides), itertools.pairwise(strides), strict=True
    ):
        assert rank >= k / stride + 5 * math.sqrt(k / stride)
        assert (rank + 5 * math.sqrt(rank)) * stride / following <= candidate_lists.CAPACITY


def test_two_ctas_share_a_block():
    for queries, block_q, sms in itertools.product((1, 5, 263, 264, 265, 529, 4096), (4, 16), (1, 7, 132)):
        blocks, ctas = -(-queries // block_q), candidate_lists.choose_ctas(queries, block_q, sms)
        assert ctas == 2 * blocks or 1 <= ctas <= min(blocks, sms)


def test_memory_of_a_query():
    """Entries, two counts, a bound and what is left."""
    assert 8 * candidate_lists.CAPACITY + 8 + 4 + 4 <= 32 * 1024
