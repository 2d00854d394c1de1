"""`topk_indices` on the CPU: results for any rows (with hypothesis), the arguments that the op passes to its kernel,
and results written into a part of a buffer."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dsa
from dsa.cases import cases_of
from dsa.kernels.indexer import limits
from dsa.kernels.indexer.topk_config import choose_config
from dsa.ops.indexer import topk_indices as op
from tests.reference.common import i32

CASE, _, INTO = cases_of("topk_indices")
INF, NAN = math.inf, math.nan


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
def test_any_rows(rows, k, start, length, by_value):
    call = CASE.arguments(rows=len(rows), k=k, sorted=by_value) | {"scores": torch.tensor(rows)}
    call |= {"starts": i32([start] * len(rows)), "lengths": i32([length] * len(rows))}
    CASE.check(call, CASE.results(call))


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
    # All calls share the placeholders for arguments that are not given.
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
@pytest.mark.parametrize("cols", [30, 0])
def test_into_a_part_of_a_buffer(cols, by_value, values):
    buffer = torch.full((8, 12), 77, dtype=torch.int32)
    for part in (buffer[1:5, 3:8], buffer[::2, :5]):
        buffer.fill_(77)
        call = INTO.arguments(rows=4, cols=30, k=5, sorted=by_value, return_values=values) | {"out": part}
        call["scores"] = call["scores"][:, :cols]
        found = INTO.results(call)
        assert found[0] is part
        INTO.check(call, found)
        part.fill_(77)
        assert (buffer == 77).all()
