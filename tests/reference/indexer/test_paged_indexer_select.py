"""The reference of scores over pages and selection in one: the two by themselves, over all sequences at once."""

from unittest import mock

import pytest
import torch

from dsa.reference import (
    fp8_paged_mqa_logits,
    paged_indexer_select,
    topk_indices,
    write_indexer_cache,
)
from dsa.reference.indexer import paged_indexer_select as module
from tests.reference.common import i32

PAGE = 16


def case(batch=3, next_n=2, max_pages=5, pages=20):
    """q, cache, weights and a block table of pages that no two sequences share. Scores of whole numbers and powers of
    two are exact: a CPU may add up those of few sequences in another order."""
    cache = torch.zeros(pages, PAGE, 1, 36, dtype=torch.uint8)
    q, keys = (torch.randint(-4, 5, shape).float() for shape in ((batch, next_n, 8, 32), (pages * PAGE, 32)))
    scales = 2.0 ** torch.randint(-3, 3, (len(keys),))
    write_indexer_cache(keys.to(torch.float8_e4m3fn), scales, cache, torch.arange(len(keys)))
    table = torch.randperm(pages)[: batch * max_pages].view(batch, max_pages).int()
    return q.to(torch.float8_e4m3fn), cache, torch.randint(-8, 9, (batch * next_n, 8)) / 4, table


def seen_by(lengths, next_n, most):
    """Keys that each query sees."""
    if lengths.dim() == 1:
        lengths = lengths[:, None].long() + torch.arange(1 - next_n, 1)
    return lengths.clamp(0, most).int().flatten()


LENGTHS = {
    "of sequences": i32([80, 0, 13]),
    "of queries": i32([[3, 80], [0, 70], [1, 0]]),
    "beyond the table": i32([2**31 - 1, 1000, 81]),
    "none": i32([-(2**31), -1, 0]),
}


@pytest.mark.parametrize("columns", [1, 50, 80, 300])
@pytest.mark.parametrize("name", LENGTHS)
def test_it_is_the_selection_of_the_scores(name, columns):
    q, cache, weights, table = case()
    lengths = LENGTHS[name]
    # Clean scores: what is beyond the keys is -inf, and would be selected if lengths were not clipped.
    scores = fp8_paged_mqa_logits(q, cache, weights, lengths, table, None, columns)
    options = {"lengths": seen_by(lengths, 2, min(columns, 80)), "return_values": True}
    paging = {"block_table": table, "page_size": PAGE, "row_to_seq": i32([0, 0, 1, 1, 2, 2])}
    for slots in (False, True):
        expected = topk_indices(scores, 12, **options, **(paging if slots else {}))
        for at_once in (module._CHUNK, 400, 1):
            with mock.patch.object(module, "_CHUNK", at_once):
                arguments = q, cache, weights, lengths, table, columns, 12
                got = paged_indexer_select(*arguments, slots=slots, return_values=True)
                assert all(map(torch.equal, got, expected))
                assert torch.equal(paged_indexer_select(*arguments, slots=slots), expected[0])


def test_keys_without_a_page_score_minus_infinity():
    """They are selected where too few others are there; a negative page has no slot."""
    q, cache, weights, table = case(batch=1, next_n=1, max_pages=3)
    table[0, 0], table[0, 2] = -1, 1000
    arguments = q, cache, weights, i32([40]), table, 48
    indices, values = paged_indexer_select(*arguments, 16, return_values=True)
    assert indices.tolist() == [[*range(16, 32)]] and values.isfinite().all()
    indices, values = paged_indexer_select(*arguments, 42, return_values=True)
    assert indices.tolist() == [[*range(40), -1, -1]]
    assert (values == -torch.inf).tolist() == [[True] * 16 + [False] * 16 + [True] * 10]
    slots, values = paged_indexer_select(*arguments, 42, slots=True, return_values=True)
    assert slots[0, :16].eq(-1).all() and slots[0, 32:40].tolist() == [1000 * PAGE + i for i in range(8)]
    assert (values == -torch.inf).tolist() == [[True] * 16 + [False] * 16 + [True] * 10]


def test_ties_zeros_and_nan():
    """Of equal scores the lowest keys; a zero has no sign; a NaN score is never selected."""
    q, cache, weights, table = case(batch=2, next_n=1)
    lengths = i32([20, 5])
    got, values = paged_indexer_select(q, cache, -torch.zeros_like(weights), lengths, table, 80, 4, return_values=True)
    assert got.tolist() == [[0, 1, 2, 3]] * 2
    assert torch.equal(values.view(torch.int32), torch.zeros(2, 4, dtype=torch.int32))
    cache.view(len(cache), -1)[table[0, 0].long(), PAGE * 32 + 4 * 3 : PAGE * 32 + 4 * 4] = 0xFF
    got = paged_indexer_select(q, cache, weights, lengths, table, 80, 20)
    assert got.tolist() == [[0, 1, 2, *range(4, 20), -1], [0, 1, 2, 3, 4] + [-1] * 15]


@pytest.mark.parametrize(("batch", "pages", "columns"), [(0, 20, 5), (3, 0, 5), (3, 20, 0)])
def test_empty(batch, pages, columns):
    q, cache, weights, table = case()
    arguments = q[:batch], cache[:pages], weights[: 2 * batch], i32([80, 3, 5])[:batch], table[:batch, :columns]
    got, values = paged_indexer_select(*arguments, 80, 100, return_values=True)
    assert got.shape == values.shape == (2 * batch, 100)
    assert (got == -1).all() and (values == -torch.inf).all()
