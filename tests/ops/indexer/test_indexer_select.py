"""The bridge of scores and selection in one, on the CPU: dispatch, what it launches, and errors."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dsa
from dsa.kernels.indexer import limits
from dsa.kernels.indexer.select_limits import MAX_SELECTED
from dsa.ops.indexer import indexer_select as op


def i32(values):
    return torch.tensor(values, dtype=torch.int32)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    keys=st.lists(st.integers(-2, 2), min_size=1, max_size=12),
    ranges=st.lists(st.tuples(st.integers(-3, 14), st.integers(-3, 14)), min_size=1, max_size=4),
    k=st.integers(1, 14),
)
def test_any_scores_are_sorted_as_python_sorts_them(keys, ranges, k):
    """Heads of one channel that counts, so that scores are small integers, many of them equal."""
    of_keys = torch.zeros(len(keys), 32)
    of_keys[:, 0] = torch.tensor(keys)
    q, weights = torch.zeros(len(ranges), 8, 32), torch.ones(len(ranges), 8)
    q[:, :3, 0], q[:, 3, 0], weights[:, 3] = 1.0, -1.0, -2.0
    starts, ends = (i32(list(column)) for column in zip(*ranges))
    kv = of_keys.to(torch.float8_e4m3fn), torch.ones(len(keys))
    got, values = dsa.indexer_select(q.to(torch.float8_e4m3fn), kv, weights, starts, ends, k, return_values=True)
    scores = [3 * max(x, 0) - 2 * max(-x, 0) for x in keys]
    for row, value, (start, end) in zip(got.tolist(), values.tolist(), ranges):
        start, end = max(start, 0), min(end, len(keys))
        best = sorted(sorted(range(start, end), key=lambda s: (-scores[s], s))[:k])
        assert row == [s - start for s in best] + [-1] * (k - len(best))
        assert value == [scores[s] for s in best] + [-torch.inf] * (k - len(best))


def arguments(queries=3, keys=10, heads=8, dim=32, top_k=4):
    q, k = torch.zeros(queries, heads, dim).to(torch.float8_e4m3fn), torch.zeros(keys, dim).to(torch.float8_e4m3fn)
    ranges = torch.zeros(queries, dtype=torch.int32), torch.full((queries,), keys, dtype=torch.int32)
    return q, (k, torch.ones(keys)), torch.ones(queries, heads), *ranges, top_k


@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (3, 0)])
def test_empty(queries, keys):
    got, values = dsa.indexer_select(*arguments(queries, keys), return_values=True)
    assert got.shape == values.shape == (queries, 4)
    assert (got == -1).all() and (values == -torch.inf).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_size": 64}, "page_size: must be None without block_table, got int"),
        ({"row_to_seq": i32([0, 0, 0])}, "row_to_seq: must be None without block_table, got Tensor"),
        ({"block_table": i32([[0]] * 3)}, "page_size: must be given with block_table, got None"),
        ({"block_table": i32([[0]] * 2), "page_size": 64}, "block_table: must have a row for each of the 3 rows"),
    ],
)
def test_paging_that_does_not_go_together(options, message):
    with pytest.raises(ValueError, match=message):
        dsa.indexer_select(*arguments(), **options)


def test_accumulators():
    with pytest.raises(ValueError, match="accumulators: must be float32 or float16, got bfloat16"):
        dsa.indexer_select(*arguments(), accumulators=torch.bfloat16)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"heads": 12}, r"q: the kernel takes \(8, 16, 32, 64\) heads, got 12"),
        ({"dim": 48}, r"q: the kernel takes head dimensions \(32, 64, 128\), got 48"),
        ({"top_k": MAX_SELECTED + 1}, f"top_k: the kernel takes up to {MAX_SELECTED}, got {MAX_SELECTED + 1}"),
    ],
)
def test_limits(sizes, message):
    q, (k, _), *_, top_k = arguments(**sizes)
    with pytest.raises(ValueError, match=message):
        op._check_limits(q, k, top_k)
    op._check_limits(arguments(heads=limits.HEADS[0], dim=limits.HEAD_DIMS[0])[0], k, MAX_SELECTED)


def test_too_many_keys():
    q, *_ = arguments()
    keys = torch.empty(limits.MAX_COLS, 32, dtype=torch.float8_e4m3fn, device="meta")
    with pytest.raises(ValueError, match=rf"kv\[0\]: the kernel takes less than {2**30} keys, got {2**30}"):
        op._check_limits(q, keys, 4)
