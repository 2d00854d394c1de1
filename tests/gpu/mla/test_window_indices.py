"""The lists of windows on the GPU: exactly the reference's, of packed keys, pages and rings, whatever these hold."""

import pytest
import torch

import dsa
from dsa.reference.mla import window_indices as reference
from dsa.testing import poison_free_memory

INT_MAX, INT_MIN = 2**31 - 1, -(2**31)
GARBAGE = [INT_MIN, INT_MAX, -1, 0, 1, 7, 1000, INT_MIN + 1, INT_MAX - 1, 2**30]
WINDOWS = [1, 7, 31, 32, 33, 128, 130, 1000]


def int32(values):
    return torch.as_tensor(values, dtype=torch.int32, device="cuda")


def boundaries(sequences, most, first=0):
    """Where that many sequences of 0 to `most` begin and end."""
    lengths = torch.randint(0, most + 1, (sequences,)) * (torch.rand(sequences) > 0.2)
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).add(first).int()


def check_indices(cu_q, cu_k, total_q, window):
    """The reference on the CPU."""
    poison_free_memory(mebibytes=64)
    got = dsa.window_indices(cu_q.cuda(), cu_k.cuda(), total_q, window)
    assert got.dtype == torch.int32 and got.is_contiguous() and got.shape == (total_q, window)
    assert torch.equal(got.cpu(), reference.window_indices(cu_q.cpu(), cu_k.cpu(), total_q, window))
    return got


def check_slots(table, lengths, s_q, page_size, window):
    poison_free_memory(mebibytes=64)
    lengths = torch.as_tensor(lengths, dtype=torch.int32)
    got = dsa.window_slots(None if table is None else table.cuda(), lengths.cuda(), s_q, page_size, window)
    assert got.dtype == torch.int32 and got.is_contiguous() and got.shape == (len(lengths), s_q, window)
    expected = reference.window_slots(None if table is None else table.cpu(), lengths, s_q, page_size, window)
    assert torch.equal(got.cpu(), expected)
    return got


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("sequences", [1, 2, 3, 31, 32, 33, 500])
def test_packed_keys(sequences, window):
    """Chunks of long sequences, whole ones, empty ones, and such with less keys than queries."""
    for most_q, most_k in ((9, 400), (60, 60), (40, 3)):
        cu_q, cu_k = boundaries(sequences, most_q), boundaries(sequences, most_k)
        check_indices(cu_q, cu_k, int(cu_q[-1]) + 3, window)
    cu_q = boundaries(sequences, 20, first=5)
    check_indices(cu_q, cu_q, int(cu_q[-1]) + 1, window)


@pytest.mark.parametrize("total_q", [0, 1, 3, 4, 5, 1000])
def test_queries_of_no_sequence(total_q):
    for values in ([0], [0, 0], [3, 3, 3], [2, 4]):
        check_indices(torch.tensor(values).int(), torch.tensor(values).int(), total_q, 5)


def test_long_sequences():
    cu = torch.tensor([0, 70_001, 70_001, 200_000]).int()
    check_indices(cu, cu, 200_000, 128)
    check_indices(torch.tensor([0, 3]).int(), torch.tensor([0, 5_000_000]).int(), 3, 1_000_000)
    check_indices(torch.tensor([0, 9]).int(), torch.tensor([INT_MAX - 5, INT_MAX]).int(), 9, 128)


@pytest.mark.parametrize("seed", range(20))
def test_anything_in_cu_seqlens(seed):
    """Of any boundaries, of the keys and of the queries, the lists are the reference's, and name no negative key."""
    torch.manual_seed(seed)
    garbage = torch.tensor(GARBAGE)
    cu_k = garbage[torch.randint(len(garbage), (9,))].int()
    check_indices(boundaries(8, 30), cu_k, 200, 128)
    cu_q = garbage[torch.randint(len(garbage), (9,))].int()
    got = check_indices(cu_q, cu_k, 200, 128)
    check_indices(torch.where(torch.rand(9) < 0.3, cu_q, boundaries(8, 30)), cu_k, 200, 128)
    beside, before = got[:, 1:], got[:, :-1]
    assert got.ge(-1).all() and ((beside == -1) | (beside == before + 1) & (before >= 0)).all()


def test_entries_beyond_2_to_the_31():
    total, window = 2**24 + 5, 130
    cu = int32([0, total])
    got = dsa.window_indices(cu, cu, total, window)
    assert got.numel() > 2**31
    rows = torch.cat((torch.arange(300), torch.randint(0, total, (2000,)), torch.arange(total - 300, total))).cuda()
    expected = (rows - window + 1).clamp(min=0)[:, None] + torch.arange(window, device="cuda")
    assert torch.equal(got[rows].long(), expected.where(expected <= rows[:, None], -1))
    del got
    slots = dsa.window_slots(None, torch.full((total,), window + 3, dtype=torch.int32, device="cuda"), 1, 100, 100)
    assert slots.numel() < 2**31 and torch.equal(
        slots[-1, 0].long(), total * 100 - 100 + (33 + torch.arange(100).cuda()) % 100
    )
    wide = dsa.window_slots(int32([[5]]).expand(total, 1), int32([7]).expand(total), 1, 16, window)
    assert wide.numel() > 2**31 and wide[-1, 0, :7].tolist() == list(range(80, 87)) and wide[-1, 0, 7:].eq(-1).all()


LENGTHS = [0, 1, 2, 3, 5, 47, 48, 49, 63, 64, 65, 127, 128, 129, 500, 1001, 3000, -3, INT_MIN, INT_MAX]


@pytest.mark.parametrize("s_q", [1, 2, 3, 4])
@pytest.mark.parametrize("window", WINDOWS)
def test_pages(window, s_q):
    for page_size, pages in ((1, 600), (48, 20), (64, 40), (256, 2)):
        table = torch.randint(0, 5000, (len(LENGTHS), pages)).int()
        check_slots(table, LENGTHS, s_q, page_size, window)
        spoiled = torch.where(
            torch.rand(table.shape) < 0.3, torch.tensor(GARBAGE).int()[torch.randint(10, table.shape)], table
        )
        check_slots(spoiled, LENGTHS, s_q, page_size, window)


@pytest.mark.parametrize("s_q", [1, 2, 3, 4])
@pytest.mark.parametrize("window", WINDOWS)
def test_rings(window, s_q):
    for page_size in (window + s_q - 1, window + s_q + 6, 1024 + s_q):
        check_slots(None, LENGTHS, s_q, page_size, window)


def test_slots_that_int32_cannot_hold():
    table = torch.tensor([[2**25 - 1, 2**25, 3], [INT_MAX, INT_MIN, 0]]).int()
    got = check_slots(table, [192, 192], 1, 64, 192)
    assert got[0, 0, 63] == INT_MAX and got[0, 0, 64:128].eq(-1).all() and got[0, 0, 128] == 192
    assert check_slots(torch.tensor([[1, 1]]).int(), [2**30 + 1], 1, 2**30, 2)[0, 0].tolist() == [INT_MAX, 2**30]
    assert check_slots(None, [9, INT_MAX], 1, 2**30, 128)[1, 0, -1] == 2**30 + (INT_MAX - 1) % 2**30


@pytest.mark.parametrize(("batch", "s_q", "pages"), [(0, 2, 3), (2, 0, 3), (2, 2, 0), (0, 0, 0)])
def test_nothing_to_do(batch, s_q, pages):
    got = check_slots(torch.zeros(batch, pages).int(), torch.full((batch,), 9), s_q, 8, 7)
    assert got.eq(-1).all()


def test_strides():
    """Parts of larger tensors, which hold something else beside them."""
    cu_q, cu_k = boundaries(40, 30).cuda(), boundaries(40, 90).cuda()
    total = int(cu_q[-1])
    expected = check_indices(cu_q, cu_k, total, 50)
    apart = [torch.stack((x, -x), 1)[:, 0] for x in (cu_q, cu_k)]
    assert torch.equal(dsa.window_indices(*apart, total, 50), expected)
    table, lengths = torch.randint(0, 99, (30, 9)).int().cuda(), torch.randint(0, 150, (30,)).int().cuda()
    expected = check_slots(table, lengths.cpu(), 2, 16, 50)
    apart = torch.stack((lengths, -lengths), 1)[:, 0]
    for other in (torch.nn.functional.pad(table, (1, 2), value=-7)[:, 1:10], table.T.contiguous().T):
        assert torch.equal(dsa.window_slots(other, apart, 2, 16, 50), expected)
    assert torch.equal(
        dsa.window_slots(table[:1].expand(30, 9), lengths, 2, 16, 50),
        check_slots(table[:1].repeat(30, 1), lengths.cpu(), 2, 16, 50),
    )


def test_graph_replay_with_new_data():
    cu_q, cu_k = int32([0] * 9), int32([0] * 9)
    table, lengths = int32([[0] * 20] * 8), int32([0] * 8)

    def lists():
        slots = dsa.window_slots(table, lengths, 3, 48, 100), dsa.window_slots(None, lengths, 3, 128, 100)
        return dsa.window_indices(cu_q, cu_k, 300, 100), *slots

    lists()  # compile outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = lists()
    for _ in range(5):
        cu_q.copy_(boundaries(8, 40))
        cu_k.copy_(boundaries(8, 400))
        table.random_(0, 500)
        lengths.random_(0, 960)
        graph.replay()
        expected = (
            reference.window_indices(cu_q.cpu(), cu_k.cpu(), 300, 100),
            reference.window_slots(table.cpu(), lengths.cpu(), 3, 48, 100),
            reference.window_slots(None, lengths.cpu(), 3, 128, 100),
        )
        for x, y in zip(got, expected, strict=True):
            assert torch.equal(x.cpu(), y)


def test_it_waits_for_what_is_before_it():
    """And what is behind it waits for it, on a stream of its own."""
    stream = torch.cuda.Stream()
    cu, lengths, table = int32([0, 0]), int32([0]), int32([[0, 0]])
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        cu.add_(int32([0, 100]))
        lengths.add_(100)
        table.add_(7)
        got = dsa.window_indices(cu, cu, 100, 8), dsa.window_slots(table, lengths, 1, 64, 8)
        sums = [x.sum() for x in got]
    stream.synchronize()
    assert got[0][99].tolist() == list(range(92, 100)) and got[1][0, 0].tolist() == list(
        range(7 * 64 + 28, 7 * 64 + 36)
    )
    assert [int(s) for s in sums] == [int(x.sum()) for x in got]


@pytest.mark.several_gpus
def test_tensors_on_another_gpu_than_the_current_one():
    cu = int32([0, 10, 30])
    with torch.cuda.device(0):
        got = dsa.window_indices(cu.to("cuda:1"), cu.to("cuda:1"), 30, 8)
    assert got.device.index == 1 and torch.equal(got.cpu(), dsa.window_indices(cu, cu, 30, 8).cpu())


def test_torch_compile():
    def lists(cu, table, lengths):
        return dsa.window_indices(cu, cu, 30, 8), dsa.window_slots(table, lengths, 1, 64, 8)

    arguments = int32([0, 10, 30]), int32([[3, 4]]), int32([100])
    compiled = torch.compile(lists, fullgraph=True, backend="aot_eager")
    for got, expected in zip(compiled(*arguments), lists(*arguments), strict=True):
        assert torch.equal(got, expected)


def test_errors_name_the_argument():
    cu = int32([0, 4])
    with pytest.raises(ValueError, match="cu_seqlens_k: must be on cu_seqlens_q's device cuda:0, got cpu"):
        dsa.window_indices(cu, cu.cpu(), 4, 8)
    with pytest.raises(ValueError, match="page_size: the kernel takes at most 1073741824, got 1073741825"):
        dsa.window_slots(int32([[0]]), int32([4]), 1, 2**30 + 1, 8)
