"""Scores over pages and selection in one call, on the CPU, against Python's sort, and what it launches."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dsa
from dsa.reference import write_indexer_cache


def i32(values):
    return torch.tensor(values, dtype=torch.int32)


def inputs(next_n=2, heads=8, dim=32, page_size=32, pages=13, batch=3, max_pages=4):
    """q, cache, weights, lengths and block table of sequences of up to 128 keys."""
    q = torch.randn(batch, next_n, heads, dim).to(torch.float8_e4m3fn)
    cache = torch.full((pages, page_size, 1, dim + 4), 0xFF, dtype=torch.uint8)
    keys = torch.randn(pages * page_size, dim).to(torch.float8_e4m3fn)
    write_indexer_cache(keys, torch.rand(len(keys)), cache, torch.arange(len(keys)))
    table = torch.randint(pages, (batch, max_pages)).int()
    lengths = i32([70, 0, 128] * batch)[:batch]
    return q, cache, torch.randn(batch * next_n, heads), lengths, table


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    keys=st.lists(st.integers(-2, 2), min_size=1, max_size=70),
    lengths=st.lists(st.integers(-3, 80), min_size=2, max_size=2),
    k=st.integers(1, 80),
)
def test_any_scores_are_sorted_as_python_sorts_them(keys, lengths, k):
    """Heads of one channel that counts, so that scores are small integers, many of them equal."""
    of_keys = torch.zeros(len(keys), 32)
    of_keys[:, 0] = torch.tensor(keys)
    q, weights = torch.zeros(1, 2, 8, 32), torch.ones(2, 8)
    q[..., :3, 0], q[..., 3, 0], weights[:, 3] = 1.0, -1.0, -2.0
    cache = torch.zeros(5, 16, 1, 36, dtype=torch.uint8)
    slots = i32([2, 0, 4, 1, 3]).repeat_interleave(16) * 16 + torch.arange(80) % 16
    write_indexer_cache(of_keys.to(torch.float8_e4m3fn), torch.ones(len(keys)), cache, slots[: len(keys)])
    arguments = q.to(torch.float8_e4m3fn), cache, weights, i32([lengths]), i32([[2, 0, 4, 1, 3]]), len(keys), k
    got, values = dsa.paged_indexer_select(*arguments, return_values=True)
    scores = [3 * max(x, 0) - 2 * max(-x, 0) for x in keys]
    for row, value, length in zip(got.tolist(), values.tolist(), lengths):
        end = min(max(length, 0), len(keys))
        best = sorted(sorted(range(end), key=lambda s: (-scores[s], s))[:k])
        assert row == best + [-1] * (k - len(best))
        assert value == [scores[s] for s in best] + [-torch.inf] * (k - len(best))
    of_slots = [[int(slots[s]) if s >= 0 else -1 for s in row] for row in got.tolist()]
    assert dsa.paged_indexer_select(*arguments, slots=True).tolist() == of_slots


@pytest.mark.parametrize(
    ("heads", "next_n", "expected"), [(64, 4, True), (64, 3, True), (64, 2, False), (64, 1, False), (32, 4, False)]
)
def test_half_scores_only_where_arithmetic_bounds(heads, next_n, expected, launches):
    arguments = inputs(next_n, heads)
    dsa.paged_indexer_select(*arguments, 100, 40, accumulators=torch.float16)
    dsa.paged_indexer_select(*arguments, 100, 40)
    assert [variant[5] for variant, _ in launches if len(variant) == 7] == [expected, False]  # of scores


def test_a_query_is_selected_from_what_it_sees(launches):
    """Of one length a sequence the last query sees all keys; a length may be any number."""
    q, cache, weights, _, table = inputs(next_n=3)
    lengths = i32([70, -(2**31), 2**31 - 1])
    dsa.paged_indexer_select(q, cache, weights, lengths, table, 100, 128, slots=True)
    *_, (_, of_topk) = launches
    assert of_topk[2].tolist() == [68, 69, 70, -2, -1, 0, 2**31 - 3, 2**31 - 2, 2**31 - 1]
    assert of_topk[4].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
