"""The bridge of the top-k, on the CPU, against Python's sort, and what it launches."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dsa
from dsa.kernels.indexer import limits
from dsa.kernels.indexer.topk_config import choose_config
from dsa.ops.indexer import topk_indices as op

INF, NAN = math.inf, math.nan


def i32(values):
    return torch.tensor(values, dtype=torch.int32)


NUMBERS = st.one_of(
    st.sampled_from([0.0, -0.0, INF, -INF, NAN, 1e-45, -1e-45, 1.0]), st.floats(width=32), st.integers(-3, 3).map(float)
)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    rows=st.lists(st.lists(NUMBERS, min_size=7, max_size=7), min_size=1, max_size=4),
    k=st.integers(1, 9),
    start=st.integers(-3, 9),
    length=st.integers(-1, 9),
    by_value=st.booleans(),
)
def test_any_row_is_sorted_as_python_sorts_it(rows, k, start, length, by_value):
    scores, count = torch.tensor(rows), len(rows)
    got, values = dsa.topk_indices(
        scores, k, starts=i32([start] * count), lengths=i32([length] * count), sorted=by_value, return_values=True
    )
    for r, row in enumerate(scores.tolist()):
        there = [c for c in range(max(start, 0), min(start + length, 7)) if not math.isnan(row[c])]
        best = sorted(there, key=lambda c: (-row[c], c))[:k]
        best = best if by_value else sorted(best)
        padding = k - len(best)
        assert got[r].tolist() == [c - start for c in best] + [-1] * padding
        assert values[r].tolist() == [row[c] for c in best] + [-INF] * padding


def test_prefill_decode_and_slots_are_one_op():
    scores = torch.randn(4, 100)
    lengths, table = i32([100, 0, 64, 7]), torch.randperm(8, dtype=torch.int32).view(4, 2)
    plain = dsa.topk_indices(scores, 10, lengths=lengths)
    slots = dsa.topk_indices(scores, 10, lengths=lengths, block_table=table, page_size=64)
    expected = torch.where(plain < 0, -1, table.gather(1, plain.clamp_min(0).long() // 64) * 64 + plain % 64)
    assert torch.equal(slots, expected)
    next_n = dsa.topk_indices(
        scores, 10, lengths=lengths, block_table=table[:2], page_size=64, row_to_seq=i32([0, 0, 1, 1])
    )
    assert torch.equal(next_n[0], slots[0]) and torch.equal(next_n[1], slots[1])


def test_options_tell_the_kernel_what_is_given(launches):
    scores, per_row, table = torch.randn(5, 72), i32([1, 2, 3, 4, 0]), torch.zeros(5, 2, dtype=torch.int32)
    dsa.topk_indices(scores, 3)
    dsa.topk_indices(scores, 3, starts=per_row, sorted=True)
    dsa.topk_indices(scores, 3, lengths=per_row, return_values=True)
    dsa.topk_indices(scores, 3, block_table=table, page_size=64, row_to_seq=per_row)
    assert [arguments[-1] for _, arguments in launches] == [
        0,
        limits.STARTS | limits.BY_VALUE,
        limits.LENGTHS | limits.VALUES,
        limits.PAGED | limits.ROW_TO_SEQ,
    ]
    assert [arguments[-2] for _, arguments in launches] == [1, 1, 1, 64]
    config = choose_config(5, 18, 3, 32, 132)
    assert all(variant == ("float32", config) for variant, _ in launches)
    first, second, third, fourth = (arguments for _, arguments in launches)
    assert second[1] is per_row and third[2] is per_row and fourth[4] is per_row and fourth[3] is table
    # What is not given is a tensor that is never read, always the same one.
    assert first[1] is first[2] is third[1] and first[3] is third[3]
    assert third[6].shape == (5, 3) and first[6].shape == (1, 1)


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 4), (torch.bfloat16, 8)])
def test_the_most_vectors_that_a_row_touches(dtype, width):
    def touched(scores):
        size, most = scores.element_size(), 0
        for row in scores:
            most = max(most, (row.data_ptr() % 16 + row.shape[0] * size + 15) // 16)
        return most

    for cols in (1, width - 1, width, width + 1, 10 * width):
        for first in range(width):
            for stride in (64 * width, 64 * width + 1, 64 * width + 3):
                scores = torch.zeros(9 * stride, dtype=dtype)[first:].as_strided((5, cols), (stride, 1))
                assert touched(scores) <= op._vectors(scores) <= touched(scores) + 1
                if stride % width == 0 and first == 0:
                    assert op._vectors(scores) == touched(scores)
                assert touched(scores[:1]) <= op._vectors(scores[:1])


def test_a_single_column_may_have_any_stride(launches):
    dsa.topk_indices(torch.randn(4, 6).T[:, :1], 2)
    assert launches[0][1][0].stride() == (1, 1)


@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("by_value", [False, True])
def test_into_a_part_of_a_buffer(by_value, values):
    scores, lengths = torch.randn(4, 30), i32([30, 2, 0, 7])
    options = {"lengths": lengths, "sorted": by_value, "return_values": values}
    expected = dsa.topk_indices(scores, 5, **options)
    buffer = torch.full((6, 12), 77, dtype=torch.int32)
    for part in (buffer[1:5, 3:8], buffer[::2, :5]):
        count = len(part)
        buffer.fill_(77)
        got = dsa.topk_indices(scores[:count], 5, **{**options, "lengths": lengths[:count]}, out=part)
        picked, picked_scores = got if values else (got, None)
        assert picked is part and torch.equal(part, (expected[0] if values else expected)[:count])
        assert picked_scores is None or torch.equal(picked_scores, expected[1][:count])
        assert (buffer == 77).sum() == buffer.numel() - part.numel()
    empty = torch.full((2, 9), 77, dtype=torch.int32)
    dsa.topk_indices(torch.empty(2, 0), 3, out=empty[:, 2:5])
    assert (empty[:, 2:5] == -1).all() and (empty[:, :2] == 77).all() and (empty[:, 5:] == 77).all()
