"""The bridge of scores and selection in one, on the CPU, against Python's sort."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dsa


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
