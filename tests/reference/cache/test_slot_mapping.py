"""Where the rows of packed tokens lie, against the definition written out."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsa.reference import slot_mapping
from tests.reference.common import assert_refused, i32

INT_MAX, INT_MIN = 2**31 - 1, -(2**31)


def written_out(table, bounds, lengths, num_tokens, page_size, ratio=1, ring=False):
    """Sequence by sequence and token by token, of boundaries in order."""
    slots = [-1] * num_tokens
    for b, (low, high) in enumerate(pairwise(bounds)):
        length = high - low if lengths is None else lengths[b]
        for t in range(low, high):
            position = length - (high - t)
            if position < 0 or position % ratio != ratio - 1:
                continue
            row, pages = position // ratio, table[b]
            if ring:
                if row < length // ratio - len(pages) * page_size:
                    continue
                row %= len(pages) * page_size
            if row // page_size < len(pages) and pages[row // page_size] >= 0:
                slots[t] = pages[row // page_size] * page_size + row % page_size
    return slots


@st.composite
def calls(draw):
    numbers = draw(st.lists(st.integers(0, 12), min_size=1, max_size=6))
    bounds = [sum(numbers[:b]) for b in range(len(numbers) + 1)]
    page = st.one_of(st.integers(0, 9), st.sampled_from([-1, INT_MIN, INT_MAX]))
    width = draw(st.integers(0, 5))
    table = [draw(st.lists(page, min_size=width, max_size=width)) for _ in numbers]
    length = st.one_of(st.integers(-3, 40), st.sampled_from([INT_MIN, INT_MAX]))
    lengths = draw(st.none() | st.lists(length, min_size=len(numbers), max_size=len(numbers)))
    page_size = draw(st.sampled_from([1, 2, 3, 8, 2**30]))
    return table, bounds, lengths, bounds[-1] + 2, page_size, draw(st.sampled_from([1, 2, 5])), draw(st.booleans())


@settings(max_examples=200, deadline=None)
@given(calls())
def test_against_the_definition(call):
    table, bounds, lengths, num_tokens, page_size, ratio, ring = call
    pages = i32(table).view(len(table), -1) if table[0] else torch.zeros(len(table), 0, dtype=torch.int32)
    of_cache = None if lengths is None else i32(lengths)
    got = slot_mapping(pages, i32(bounds), of_cache, num_tokens, page_size, ratio=ratio, ring=ring)
    assert got.dtype == torch.int64 and got.tolist() == written_out(*call)


def test_slots_beyond_32_bits():
    got = slot_mapping(i32([[INT_MAX, INT_MAX]]), i32([0, 2]), i32([65]), 2, 64)
    assert got.tolist() == [INT_MAX * 64 + 63, INT_MAX * 64]
    assert slot_mapping(i32([[2**25]]), i32([0, 1]), None, 1, 64).tolist() == [2**31]


def test_tokens_of_no_sequence():
    assert slot_mapping(i32([[5]]), i32([1, 3]), None, 4, 8).tolist() == [-1, 40, 41, -1]
    assert slot_mapping(i32([[5]])[:0], i32([0]), i32([])[:0], 2, 8).tolist() == [-1, -1]
    assert slot_mapping(i32([[5]]), i32([0, 1]), i32([1]), 0, 8).shape == (0,)


def test_a_sequence_that_begins_behind_another_takes_its_tokens():
    table = i32([[1], [2], [3]])
    assert slot_mapping(table, i32([0, 9, 2, 4]), None, 6, 8).tolist() == [8, 9, 24, 25, 12, 13]
    # Of the first one's 2^32 - 1 tokens none has a slot.
    assert slot_mapping(table[:1], i32([INT_MIN, INT_MAX]), None, 2, 8, ring=True).tolist() == [-1, -1]


BOUNDS, LENGTHS = [0, 3, 3, 4, 10, 12], [5, 2, 9, 6, 31]


@pytest.mark.parametrize("wrong", [-1, INT_MIN, 13, INT_MAX])
@pytest.mark.parametrize("place", range(len(BOUNDS)))
def test_a_boundary_outside_spoils_the_sequences_beside_it_alone(place, wrong):
    table = torch.randint(0, 30, (5, 8)).int()
    spoiled = i32(BOUNDS)
    spoiled[place] = wrong
    others = torch.ones(12, dtype=torch.bool)
    others[BOUNDS[max(place - 1, 0)] : BOUNDS[min(place + 1, 5)]] = False
    for lengths in (i32(LENGTHS), None):
        right, got = (slot_mapping(table, bounds, lengths, 12, 4) for bounds in (i32(BOUNDS), spoiled))
        assert torch.equal(got[others], right[others])


TABLE, BOUNDS_OF_ONE, LENGTH = i32([[0, 1]]), i32([0, 4]), i32([9])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_table": TABLE[0]}, r"block_table: shape must be \[B, max_pages\], got \[2\]"),
        ({"cu_seqlens": BOUNDS_OF_ONE.long()}, "cu_seqlens: dtype must be int32, got int64"),
        ({"cu_seqlens": BOUNDS_OF_ONE[:1]}, r"cu_seqlens: shape must be \[2\], got \[1\]"),
        ({"cache_seqlens": BOUNDS_OF_ONE}, r"cache_seqlens: shape must be \[1\], got \[2\]"),
        ({"num_tokens": -1}, "num_tokens: must be at least 0, got -1"),
        ({"page_size": 0}, "page_size: must be at least 1, got 0"),
        ({"ratio": 0}, "ratio: must be at least 1, got 0"),
        ({"ring": 1}, "ring: must be True or False, got int"),
    ],
)
def test_wrong_arguments_are_named(changes, message):
    good = {"block_table": TABLE, "cu_seqlens": BOUNDS_OF_ONE, "cache_seqlens": LENGTH, "num_tokens": 4, "page_size": 8}
    assert_refused(message, slot_mapping, **good | changes)
