"""The reference of scores and selection in one op: chunks of queries, clipped ranges, ties, NaN."""

from unittest import mock

import pytest
import torch

from dsa.cases import cases_of
from dsa.reference import indexer_select
from dsa.reference.indexer import indexer_select as module
from tests.reference.common import i32

CASE = cases_of("indexer_select")[0]


def case(queries, keys):
    given = CASE.arguments(queries=queries, keys=keys)
    return given["q"], given["kv"], given["weights"]


@pytest.mark.parametrize("chunk", [module._CHUNK, 200, 1])
@pytest.mark.parametrize("return_values", [True, False])
@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("row_to_seq", [True, False])
def test_chunks_of_queries(row_to_seq, page_size, return_values, chunk):
    """Sums are exact, because a CPU may add those of few queries in another order."""
    sizes = {"queries": 5, "keys": 90, "top_k": 12, "page_size": page_size, "return_values": return_values}
    given = CASE.arguments(**sizes, exact=True)
    if page_size and not row_to_seq:  # a table per query
        given |= {"block_table": given["block_table"][given["row_to_seq"].long()], "row_to_seq": None}
    with mock.patch.object(module, "_CHUNK", chunk):
        CASE.check(given, CASE.results(given))


def test_ranges_outside_the_keys_are_clipped():
    arguments = case(3, 10)
    got = indexer_select(*arguments, i32([-(2**31), 8, 2**31 - 1]), i32([2**31 - 1, 2**31 - 1, -5]), 10)
    assert got.tolist() == [[*range(10)], [0, 1] + [-1] * 8, [-1] * 10]


def test_ties_and_nan():
    """Scores of zero tie, and the lowest key wins. A NaN score is never selected."""
    q, (k, scale), weights = case(2, 20)
    zeros = torch.zeros_like(weights)
    assert indexer_select(q, (k, scale), zeros, i32([3, 0]), i32([20, 20]), 4).tolist() == [[0, 1, 2, 3]] * 2
    scale[4] = torch.nan
    got = indexer_select(q, (k, scale), weights, i32([0, 0]), i32([20, 5]), 20)
    assert got.tolist() == [[*range(4), *range(5, 20), -1], [0, 1, 2, 3] + [-1] * 16]
