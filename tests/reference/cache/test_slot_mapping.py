"""The reference of slot_mapping: random numbers, compared with the definition in `dsa.cases`, and slots by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsa.cases import cases_of
from dsa.reference import slot_mapping
from tests.reference.common import i32

CASE = cases_of("slot_mapping")[0]
INT_MAX, INT_MIN = 2**31 - 1, -(2**31)


@st.composite
def calls(draw):
    numbers = draw(st.lists(st.integers(0, 12), min_size=1, max_size=6))
    bounds = [sum(numbers[:b]) for b in range(len(numbers) + 1)]
    page = st.one_of(st.integers(0, 9), st.sampled_from([-1, INT_MIN, INT_MAX]))
    width = draw(st.integers(0, 5))
    table = [draw(st.lists(page, min_size=width, max_size=width)) for _ in numbers]
    length = st.one_of(st.integers(-3, 40), st.sampled_from([INT_MIN, INT_MAX]))
    lengths = draw(st.none() | st.lists(length, min_size=len(numbers), max_size=len(numbers)))
    options = {"page_size": draw(st.sampled_from([1, 2, 3, 8, 2**30])), "ratio": draw(st.sampled_from([1, 2, 5]))}
    options |= {"ring": draw(st.booleans()), "num_tokens": bounds[-1] + 2}
    cached = None if lengths is None else i32(lengths)
    return {"block_table": i32(table), "cu_seqlens": i32(bounds), "cache_seqlens": cached, **options}


@settings(max_examples=200, deadline=None)
@given(calls())
def test_against_the_definition(call):
    CASE.check(call, [slot_mapping(**call)])


@pytest.mark.parametrize(
    ("table", "bounds", "cached", "tokens", "page_size", "expected"),
    [
        # slots beyond 32 bits
        (i32([[INT_MAX, INT_MAX]]), [0, 2], i32([65]), 2, 64, [INT_MAX * 64 + 63, INT_MAX * 64]),
        (i32([[2**25]]), [0, 1], None, 1, 64, [2**31]),
        # tokens that belong to no sequence
        (i32([[5]]), [1, 3], None, 4, 8, [-1, 40, 41, -1]),
        (i32([[5]])[:0], [0], i32([]), 2, 8, [-1, -1]),
        # If sequences overlap, a common token belongs to the sequence that begins last.
        (i32([[1], [2], [3]]), [0, 9, 2, 4], None, 6, 8, [8, 9, 24, 25, 12, 13]),
    ],
)
def test_slots_by_hand(table, bounds, cached, tokens, page_size, expected):
    assert slot_mapping(table, i32(bounds), cached, tokens, page_size).tolist() == expected


def test_a_sequence_of_2_to_the_32_tokens_has_no_slots():
    assert slot_mapping(i32([[1]]), i32([INT_MIN, INT_MAX]), None, 2, 8, ring=True).tolist() == [-1, -1]
