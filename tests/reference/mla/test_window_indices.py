"""Lists of a window's keys, against the definition written out."""

import pytest
import torch

from dsa.reference import window_indices, window_slots
from tests.reference.common import assert_refused, i32
from tests.reference.mla.packed_windows import CU_K, CU_Q, visible


def padded(keys, window):
    return keys + [-1] * (window - len(keys))


def expected_slots(table, lengths, s_q, page_size, window):
    out = []
    for b, length in enumerate(lengths):
        for i in range(s_q):
            slots = []
            for j in range(max(0, length - s_q + i - window + 1), length - s_q + i + 1):
                page = b if table is None else (table[b][j // page_size] if j // page_size < len(table[b]) else -1)
                slot = page * page_size + j % page_size
                slots.append(slot if page >= 0 and slot < 2**31 else -1)
            out.append(padded(slots, window))
    return torch.tensor(out).view(len(lengths), s_q, window)


@pytest.mark.parametrize("window", [1, 2, 5, 128])
def test_indices_against_the_definition(window):
    got = window_indices(i32(CU_Q), i32(CU_K), 12, window)
    assert got.dtype == torch.int32 and got.tolist() == [padded(keys, window) for keys in visible(window)]


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
@pytest.mark.parametrize("place", range(len(CU_Q)))
def test_a_boundary_outside_spoils_the_sequences_next_to_it_alone(place, wrong):
    right = window_indices(i32(CU_Q), i32(CU_K), 12, 5)
    spoiled = i32(CU_Q)
    spoiled[place] = wrong
    got = window_indices(spoiled, i32(CU_K), 12, 5)
    others = torch.ones(12, dtype=torch.bool)
    others[CU_Q[max(place - 1, 0)] : CU_Q[min(place + 1, 5)]] = False
    assert torch.equal(got[others], right[others])


LENGTHS = [0, 1, 2, 5, 9, 12, 13, 40, -3, -(2**31), 2**31 - 1]


@pytest.mark.parametrize("s_q", [1, 2, 4])
@pytest.mark.parametrize("window", [1, 3, 8, 50])
def test_slots_of_pages(window, s_q):
    table = torch.randint(0, 30, (len(LENGTHS), 4)).int()
    table[5, 1], table[6, 0], table[7, 2] = -1, -(2**31), 2**31 - 1
    got = window_slots(table, i32(LENGTHS), s_q, 3, window)
    assert got.dtype == torch.int32
    assert torch.equal(got.long(), expected_slots(table.tolist(), LENGTHS, s_q, 3, window))


@pytest.mark.parametrize("s_q", [1, 2, 4])
@pytest.mark.parametrize("window", [1, 3, 8])
def test_slots_of_rings(window, s_q):
    size = window + s_q - 1
    for page_size in (size, size + 5):
        got = window_slots(None, i32(LENGTHS), s_q, page_size, window)
        assert torch.equal(got.long(), expected_slots(None, LENGTHS, s_q, page_size, window))
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
        (window_indices, (CU.long(), CU, 4, 3), "cu_seqlens_q: dtype must be int32, got int64"),
        (window_indices, (CU[:0], CU[:0], 4, 3), r"cu_seqlens_q: must have B \+ 1 entries, got shape \[0\]"),
        (
            window_indices,
            (CU, CU[:1], 4, 3),
            r"cu_seqlens_k: shape must be \[2\], got \[1\] \(sizes as of cu_seqlens_q",
        ),
        (window_indices, (CU, CU, -1, 3), "total_q: must be at least 0, got -1"),
        (window_indices, (CU, CU, 4.0, 3), "total_q: must be an int, got float"),
        (window_indices, (CU, CU, 4, 0), "window: must be at least 1, got 0"),
        (window_slots, (TABLE[0], ONE, 1, 8, 3), r"block_table: shape must be \[1, max_pages\], got \[2\]"),
        (window_slots, (TABLE, TABLE, 1, 8, 3), r"cache_seqlens: shape must be \[B\], got \[1, 2\]"),
        (window_slots, (TABLE, ONE, -2, 8, 3), "s_q: must be at least 0, got -2"),
        (window_slots, (TABLE, ONE, True, 8, 3), "s_q: must be an int, got bool"),
        (window_slots, (TABLE, ONE, 1, 0, 3), "page_size: must be at least 1, got 0"),
        (window_slots, (TABLE, ONE, 1, 8, 0), "window: must be at least 1, got 0"),
        (window_slots, (None, ONE, 2, 8, 8), r"page_size: a ring must hold window \+ s_q - 1 = 9 keys .*, got 8"),
        (
            window_slots,
            (None, i32([9] * 3), 1, 2**30, 8),
            r"page_size: .* 3 sequences must have at most 2\^31 slots to",
        ),
    ],
)
def test_wrong_arguments_are_named(function, arguments, message):
    assert_refused(message, function, *arguments)
