"""The reference of scores and selection in one: the two by themselves, over all queries at once."""

from unittest import mock

import torch

from dsa.reference import fp8_mqa_logits, indexer_select, topk_indices
from dsa.reference.indexer import indexer_select as module
from tests.reference.common import i32


def case(queries, keys):
    q = torch.randn(queries, 8, 32).to(torch.float8_e4m3fn)
    kv = torch.randn(keys, 32).to(torch.float8_e4m3fn), torch.rand(keys) + 0.1
    return q, kv, torch.randn(queries, 8)


def test_it_is_the_selection_of_the_scores():
    """Of whole numbers, whose sums are exact: a CPU may add up those of few queries in another order."""
    q, k = (torch.randint(-4, 5, (rows, 32)).float().to(torch.float8_e4m3fn) for rows in (5 * 8, 90))
    scale, weights = 2.0 ** torch.randint(-3, 3, (90,)), torch.randint(-8, 9, (5, 8)) / 4
    arguments = q.view(5, 8, 32), (k, scale), weights
    starts, ends = i32([0, 3, 40, 89, 10]), i32([90, 50, 40, 90, 11])
    scores = fp8_mqa_logits(*arguments, starts, ends)
    options = {"starts": starts, "lengths": (ends - starts).clamp_min(0), "return_values": True}
    table, sequences = i32([[5, 2, 7, 1, 9, 8], [0, -1, 3, 4, 6, 2]]), i32([0, 0, 1, 1, 0])
    for paging in (
        {},
        {"block_table": table, "page_size": 16, "row_to_seq": sequences},
        {"block_table": table[sequences.long()], "page_size": 16},
    ):
        expected = topk_indices(scores, 12, **options, **paging)
        for at_once in (module._CHUNK, 200, 1):
            with mock.patch.object(module, "_CHUNK", at_once):
                got = indexer_select(*arguments, starts, ends, 12, **paging, return_values=True)
                assert all(map(torch.equal, got, expected))
                assert torch.equal(indexer_select(*arguments, starts, ends, 12, **paging), expected[0])


def test_ranges_outside_the_keys_are_clipped():
    arguments = case(3, 10)
    got = indexer_select(*arguments, i32([-(2**31), 8, 2**31 - 1]), i32([2**31 - 1, 2**31 - 1, -5]), 10)
    assert got.tolist() == [[*range(10)], [0, 1] + [-1] * 8, [-1] * 10]


def test_ties_and_nan():
    """Scores of zero tie, and the lowest key wins; a NaN score is never selected."""
    q, (k, scale), weights = case(2, 20)
    zeros = torch.zeros_like(weights)
    assert indexer_select(q, (k, scale), zeros, i32([3, 0]), i32([20, 20]), 4).tolist() == [[0, 1, 2, 3]] * 2
    scale[4] = torch.nan
    got = indexer_select(q, (k, scale), weights, i32([0, 0]), i32([20, 5]), 20)
    assert got.tolist() == [[*range(4), *range(5, 20), -1], [0, 1, 2, 3] + [-1] * 16]
