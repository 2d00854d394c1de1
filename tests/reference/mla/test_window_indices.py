"""The references of window_indices and window_slots: lists by hand, boundaries in any order, missing pages, and empty
inputs."""

import pytest
import torch

from dsa.cases import cases_of
from dsa.reference import window_indices, window_slots
from tests.reference.common import i32

SLOTS = cases_of("window_indices")[1]


@pytest.mark.parametrize(
    ("cu_q", "cu_k", "total", "window", "expected"),
    [
        ([0, 3, 4], [0, 9, 12], 4, 3, [[4, 5, 6], [5, 6, 7], [6, 7, 8], [9, 10, 11]]),
        ([0, 3], [0, 3], 3, 3, [[0, -1, -1], [0, 1, -1], [0, 1, 2]]),
        # queries and keys that belong to no sequence
        ([1, 3], [2, 4], 5, 2, [[-1, -1], [2, -1], [2, 3], [-1, -1], [-1, -1]]),
        ([0], [0], 2, 3, [[-1] * 3] * 2),
        ([0, 0], [0, 4], 0, 3, []),
    ],
)
def test_indices_by_hand(cu_q, cu_k, total, window, expected):
    assert window_indices(i32(cu_q), i32(cu_k), total, window).tolist() == expected


@pytest.mark.parametrize("seed", range(5))
def test_bounds_in_any_order_name_no_negative_key(seed):
    torch.manual_seed(seed)
    special = i32([-(2**31), 2**31 - 1, -1, 0, 3, 7, 100])
    cu_q, cu_k = (special[torch.randint(len(special), (6,))] for _ in range(2))
    got = window_indices(cu_q, cu_k, 9, 4)
    assert got.ge(-1).all()
    # The keys of a row are consecutive, and only -1 follows the last key.
    after = got[:, 1:]
    assert ((after == -1) | (after == got[:, :-1] + 1) & (got[:, :-1] >= 0)).all()


@pytest.mark.parametrize("s_q", [1, 2, 4])
@pytest.mark.parametrize("window", [1, 3, 8, 50])
@pytest.mark.parametrize("more", [None, 0, 5])
def test_slots_are_right(more, window, s_q):
    """more: None for a paged cache with missing pages. Otherwise the cache is a ring of window + s_q - 1 + `more`
    rows."""
    lengths = (0, 1, 2, 5, 9, 12, 13, 40, -3, -(2**31), 2**31 - 1)
    page, ring = (3, False) if more is None else (window + s_q - 1 + more, True)
    given = SLOTS.arguments(lengths=lengths, s_q=s_q, window=window, pages=4, page=page, ring=ring)
    if not ring:
        given["block_table"][5, 1], given["block_table"][6, 0], given["block_table"][7, 2] = -1, -(2**31), 2**31 - 1
    SLOTS.check(given, SLOTS.run(given))


def test_slots_that_int32_cannot_hold():
    got = window_slots(i32([[2**25 - 1, 2**25]]), i32([128]), 1, 64, 128)
    assert got[0, 0, 63] == 2**31 - 1 and got[0, 0, 64:].eq(-1).all()


def test_nothing_cached():
    assert window_slots(i32([[], []]), i32([5, 0]), 1, 64, 3).eq(-1).all()
    assert window_slots(i32([[1]])[:0], i32([5])[:0], 2, 64, 3).shape == (0, 2, 3)
    assert window_slots(i32([[1]]), i32([5]), 0, 64, 3).shape == (1, 0, 3)
