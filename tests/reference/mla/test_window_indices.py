"""The references of windows' lists: bounds in any order, missing pages, nothing cached, and refused arguments."""

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.reference import window_indices, window_slots
from tests.reference.common import assert_refused, i32

INDICES, SLOTS, _ = cases_of("window_indices")
SEQUENCES = ((3, 3), (0, 2), (1, 7), (6, 18), (2, 1))


@pytest.mark.parametrize("window", [1, 2, 5, 128])
def test_indices_are_right(window):
    INDICES.verify(sequences=SEQUENCES, window=window)
    given = INDICES.arguments(sequences=SEQUENCES, window=3, more=0)
    assert window_indices(**given).tolist()[:4] == [[0, -1, -1], [0, 1, -1], [0, 1, 2], [9, 10, 11]]


def test_queries_and_keys_of_no_sequence():
    assert window_indices(i32([1, 3]), i32([2, 4]), 5, 2).tolist() == [[-1, -1], [2, -1], [2, 3], [-1, -1], [-1, -1]]
    assert window_indices(i32([0]), i32([0]), 2, 3).tolist() == [[-1] * 3] * 2
    assert window_indices(i32([0, 0]), i32([0, 4]), 0, 3).shape == (0, 3)


@pytest.mark.parametrize("seed", range(5))
def test_numbers_in_any_order_name_no_negative_key(seed):
    torch.manual_seed(seed)
    special = i32([-(2**31), 2**31 - 1, -1, 0, 3, 7, 100])
    cu_q, cu_k = (special[torch.randint(len(special), (6,))] for _ in range(2))
    got = window_indices(cu_q, cu_k, 9, 4)
    assert got.ge(-1).all()
    # The keys of a row are neighbours, and -1 follows them.
    after = got[:, 1:]
    assert ((after == -1) | (after == got[:, :-1] + 1) & (got[:, :-1] >= 0)).all()


@pytest.mark.parametrize("wrong", [-1, -(2**31), 13, 2**31 - 1])
@pytest.mark.parametrize("place", range(len(SEQUENCES) + 1))
def test_a_boundary_outside_spoils_the_sequences_next_to_it_alone(place, wrong):
    given = INDICES.arguments(sequences=SEQUENCES, window=5, more=0)
    right, bounds = window_indices(**given), given["cu_seqlens_q"].tolist()
    given["cu_seqlens_q"][place] = wrong
    others = torch.ones(12, dtype=torch.bool)
    others[bounds[max(place - 1, 0)] : bounds[min(place + 1, 5)]] = False
    assert torch.equal(window_indices(**given)[others], right[others])


LENGTHS = (0, 1, 2, 5, 9, 12, 13, 40, -3, -(2**31), 2**31 - 1)


@pytest.mark.parametrize("s_q", [1, 2, 4])
@pytest.mark.parametrize("window", [1, 3, 8, 50])
def test_slots_are_right(window, s_q):
    sizes = {"lengths": LENGTHS, "s_q": s_q, "window": window}
    given = SLOTS.arguments(**sizes, page=3, pages=4)
    given["block_table"][5, 1], given["block_table"][6, 0], given["block_table"][7, 2] = -1, -(2**31), 2**31 - 1
    SLOTS.check(given, SLOTS.run(given))
    size = window + s_q - 1
    for page in (size, size + 5):
        given = SLOTS.arguments(**sizes, page=page, ring=True)
        (got,) = SLOTS.run(given)
        SLOTS.check(given, [got])
        # No slot twice among all that a sequence's queries see.
        for length, own in zip(LENGTHS, got):
            assert len(own[own >= 0].unique()) == min(max(length, 0), size)


def test_slots_that_int32_cannot_hold():
    table = i32([[2**25 - 1, 2**25]])
    got = window_slots(table, i32([128]), 1, 64, 128)
    assert got[0, 0, 63] == 2**31 - 1 and got[0, 0, 64:].eq(-1).all()


def test_nothing_cached():
    assert window_slots(torch.zeros(2, 0, dtype=torch.int32), i32([5, 0]), 1, 64, 3).eq(-1).all()
    assert window_slots(i32([[1]])[:0], i32([5])[:0], 2, 64, 3).shape == (0, 2, 3)
    assert window_slots(i32([[1]]), i32([5]), 0, 64, 3).shape == (1, 0, 3)


CU, TABLE, ONE = i32([0, 4]), i32([[0, 1]]), i32([9])


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (dsa.window_indices, (CU.long(), CU, 4, 3), "cu_seqlens_q: dtype must be int32, got int64"),
        (dsa.window_indices, (CU[:0], CU[:0], 4, 3), r"cu_seqlens_q: must have B \+ 1 entries, got shape \[0\]"),
        (
            dsa.window_indices,
            (CU, CU[:1], 4, 3),
            r"cu_seqlens_k: shape must be \[2\], got \[1\] \(sizes as of cu_seqlens_q",
        ),
        (dsa.window_indices, (CU, CU, -1, 3), "total_q: must be at least 0, got -1"),
        (dsa.window_indices, (CU, CU, 4.0, 3), "total_q: must be an int, got float"),
        (dsa.window_indices, (CU, CU, 4, 0), "window: must be at least 1, got 0"),
        (dsa.window_slots, (TABLE[0], ONE, 1, 8, 3), r"block_table: shape must be \[1, max_pages\], got \[2\]"),
        (dsa.window_slots, (TABLE, TABLE, 1, 8, 3), r"cache_seqlens: shape must be \[B\], got \[1, 2\]"),
        (dsa.window_slots, (TABLE, ONE, -2, 8, 3), "s_q: must be at least 0, got -2"),
        (dsa.window_slots, (TABLE, ONE, True, 8, 3), "s_q: must be an int, got bool"),
        (dsa.window_slots, (TABLE, ONE, 1, 0, 3), "page_size: must be at least 1, got 0"),
        (dsa.window_slots, (TABLE, ONE, 1, 8, 0), "window: must be at least 1, got 0"),
        (dsa.window_slots, (None, ONE, 2, 8, 8), r"page_size: a ring must hold window \+ s_q - 1 = 9 keys .*, got 8"),
        (
            dsa.window_slots,
            (None, i32([9] * 3), 1, 2**30, 8),
            r"page_size: .* 3 sequences must have at most 2\^31 slots to",
        ),
    ],
)
def test_wrong_arguments_are_named(function, arguments, message):
    assert_refused(message, function, *arguments)
