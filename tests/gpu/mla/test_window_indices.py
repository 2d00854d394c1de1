"""window_indices and window_slots (index lists of sliding windows) on the GPU: packed keys, paged caches and ring
buffers, with any numbers in boundaries, lengths and block tables."""

import pytest
import torch

import dsa
from dsa.testing import poison_free_memory
from tests.gpu.attention import case_of, checked, int32

INT_MAX, INT_MIN = 2**31 - 1, -(2**31)
GARBAGE = [INT_MIN, INT_MAX, -1, 0, 1, 7, 1000, INT_MIN + 1, INT_MAX - 1, 2**30]
INDICES, SLOTS = case_of("window_indices"), case_of("window_slots")
WINDOWS = [1, 7, 32, 33, 128, 130, 1000]
LENGTHS = [0, 1, 2, 3, 5, 47, 48, 49, 63, 64, 65, 127, 128, 129, 500, 1001, 3000, -3, INT_MIN, INT_MAX]


def boundaries(sequences, most, first=0):
    lengths = torch.randint(0, most + 1, (sequences,)) * (torch.rand(sequences) > 0.2)
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).add(first).int()


def garbage(*shape):
    return torch.tensor(GARBAGE)[torch.randint(len(GARBAGE), shape)].int()


def check_indices(cu_q, cu_k, total_q, window):
    poison_free_memory(mebibytes=64)
    got = dsa.window_indices(cu_q.cuda(), cu_k.cuda(), total_q, window)
    assert torch.equal(got.cpu(), dsa.reference.window_indices(cu_q, cu_k, total_q, window))


def check_slots(table, lengths, s_q, page_size, window):
    keys = {"block_table": table if table is None else table.cuda(), "cache_seqlens": int32(lengths)}
    return checked(SLOTS, {**keys, "s_q": s_q, "page_size": page_size, "window": window})[0]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("sequences", [1, 2, 31, 32, 33, 500])
def test_lists_of_packed_keys_are_right(sequences, window):
    """There are far more keys than queries (as for a chunk of a long sequence), about as many, or fewer. In the last
    call the boundaries begin at 5."""
    for most_q, most_k in ((9, 400), (60, 60), (40, 3)):
        lengths = [torch.randint(0, most + 1, (sequences,)).tolist() for most in (most_q, most_k)]
        checked(INDICES, INDICES.arguments("cuda", sequences=tuple(zip(*lengths)), window=window))
    cu_q = boundaries(sequences, 20, first=5)
    check_indices(cu_q, cu_q, int(cu_q[-1]) + 1, window)


@pytest.mark.parametrize(
    ("cu_q", "cu_k", "total_q", "window"),
    [
        *((x, x, total, 5) for x in ([0], [0, 0], [3, 3, 3], [2, 4]) for total in (0, 1, 3, 4, 5, 1000)),
        ([0, 70_001, 70_001, 200_000], [0, 70_001, 70_001, 200_000], 200_000, 128),
        ([0, 3], [0, 5_000_000], 3, 1_000_000),
        ([0, 9], [INT_MAX - 5, INT_MAX], 9, 128),
    ],
)
def test_lists_without_sequences_and_of_long_ones_are_right(cu_q, cu_k, total_q, window):
    check_indices(torch.tensor(cu_q).int(), torch.tensor(cu_k).int(), total_q, window)


@pytest.mark.parametrize("seed", range(20))
def test_lists_of_wrong_bounds_are_right(seed):
    torch.manual_seed(seed)
    valid, wrong = boundaries(8, 30), garbage(9)
    for cu_q in (valid, wrong, torch.where(torch.rand(9) < 0.3, wrong, valid)):
        check_indices(cu_q, garbage(9), 200, 128)


def test_lists_of_more_than_2_to_the_31_entries_are_right():
    total, window = 2**24 + 5, 130
    cu = int32([0, total])
    got = dsa.window_indices(cu, cu, total, window)
    assert got.numel() > 2**31
    rows = torch.cat((torch.arange(300), torch.randint(0, total, (2000,)), torch.arange(total - 300, total))).cuda()
    expected = (rows - window + 1).clamp(min=0)[:, None] + torch.arange(window, device="cuda")
    assert torch.equal(got[rows].long(), expected.where(expected <= rows[:, None], -1))
    del got
    ring = dsa.window_slots(None, torch.full((total,), window + 3, dtype=torch.int32, device="cuda"), 1, 100, 100)
    assert torch.equal(ring[-1, 0].long(), (total - 1) * 100 + (33 + torch.arange(100, device="cuda")) % 100)
    del ring
    wide = dsa.window_slots(int32([[5]]).expand(total, 1), int32([7]).expand(total), 1, 16, window)
    assert wide.numel() > 2**31 and wide[-1, 0, :7].tolist() == list(range(80, 87)) and wide[-1, 0, 7:].eq(-1).all()


@pytest.mark.parametrize("s_q", [1, 2, 3, 4])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("page_size", "pages"), [(1, 600), (48, 20), (64, 40), (256, 2)])
def test_slots_of_pages_are_right(page_size, pages, window, s_q):
    table = torch.randint(0, 5000, (len(LENGTHS), pages)).int()
    check_slots(table, LENGTHS, s_q, page_size, window)
    spoiled = torch.where(torch.rand(table.shape) < 0.3, garbage(*table.shape), table)
    check_slots(spoiled, LENGTHS, s_q, page_size, window)


@pytest.mark.parametrize("s_q", [1, 2, 3, 4])
@pytest.mark.parametrize("window", WINDOWS)
def test_slots_of_rings_are_right(window, s_q):
    for page_size in (window + s_q - 1, window + s_q + 6, 1024 + s_q):
        check_slots(None, LENGTHS, s_q, page_size, window)


def test_slots_that_int32_cannot_hold_are_none():
    table = torch.tensor([[2**25 - 1, 2**25, 3], [INT_MAX, INT_MIN, 0]]).int()
    got = check_slots(table, [192, 192], 1, 64, 192)
    assert got[0, 0, 63] == INT_MAX and got[0, 0, 64:128].eq(-1).all() and got[0, 0, 128] == 192
    assert check_slots(torch.tensor([[1, 1]]).int(), [2**30 + 1], 1, 2**30, 2)[0, 0].tolist() == [INT_MAX, 2**30]
    assert check_slots(None, [9, INT_MAX], 1, 2**30, 128)[1, 0, -1] == 2**30 + (INT_MAX - 1) % 2**30


@pytest.mark.parametrize(("batch", "s_q", "pages"), [(0, 2, 3), (2, 0, 3), (2, 2, 0), (0, 0, 0)])
def test_slots_of_nothing_are_none(batch, s_q, pages):
    assert check_slots(torch.zeros(batch, pages).int(), torch.full((batch,), 9), s_q, 8, 7).eq(-1).all()
