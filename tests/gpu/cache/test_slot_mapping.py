"""Slots on the GPU: exactly the reference's, of new tokens, all tokens, entries and rings, whatever the numbers are."""

import itertools

import pytest
import torch

import dsa
from dsa.reference.cache import slot_mapping as reference
from dsa.testing import poison_free_memory
from tests.gpu.op_checks import assert_same_on_the_second_gpu, on_a_late_stream, replays

INT_MAX, INT_MIN = 2**31 - 1, -(2**31)
GARBAGE = torch.tensor([INT_MIN, INT_MAX, -1, 0, 1, 7, 1000, INT_MIN + 1, INT_MAX - 1, 2**30])
OPTIONS = [{"ratio": ratio, "ring": ring} for ratio, ring in itertools.product((1, 4, 128), (False, True))]


def int32(values):
    return torch.as_tensor(values, dtype=torch.int32, device="cuda")


def garbage(*shape):
    return GARBAGE[torch.randint(len(GARBAGE), shape)].int()


def boundaries(sequences, most, first=0):
    """Where that many sequences of 0 to `most` tokens begin and end."""
    lengths = torch.randint(0, most + 1, (sequences,)) * (torch.rand(sequences) > 0.2)
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).add(first).int()


def check(table, bounds, lengths, num_tokens, page_size, **options):
    """The reference on the CPU."""
    poison_free_memory(mebibytes=64)
    of_gpu = [None if x is None else x.cuda() for x in (table, bounds, lengths)]
    got = dsa.slot_mapping(*of_gpu, num_tokens, page_size, **options)
    assert got.dtype == torch.int64 and got.is_contiguous() and got.shape == (num_tokens,)
    expected = reference.slot_mapping(table, bounds, lengths, num_tokens, page_size, **options)
    assert torch.equal(got.cpu(), expected)
    return got


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("sequences", [1, 2, 3, 4, 5, 33, 500])
def test_tokens_of_sequences(sequences, options):
    """Chunks, whole sequences, empty ones, such with more tokens than the cache has, and missing pages."""
    for page_size, pages in ((1, 300), (48, 7), (64, 3), (128, 1)):
        table = torch.randint(-1, 5000, (sequences, pages)).int()
        bounds = boundaries(sequences, 40, first=2)
        total = int(bounds[-1]) + 3
        check(table, bounds, None, total, page_size, **options)
        check(table, bounds, torch.randint(-2, 400, (sequences,)).int(), total, page_size, **options)
        check(table, bounds, bounds.diff() + torch.randint(0, 300, (sequences,)).int(), total, page_size, **options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("sequences", [1, 2, 127, 128, 129, 1000])
def test_decoding(sequences, options):
    table, bounds = torch.randint(-1, 5000, (sequences, 9)).int(), torch.arange(sequences + 1).int()
    check(table, bounds, torch.randint(1, 600, (sequences,)).int(), sequences, 64, **options)


@pytest.mark.parametrize("num_tokens", [0, 1, 127, 128, 129, 1000])
def test_tokens_of_no_sequence(num_tokens):
    for values in ([0, 0], [3, 3], [2, 4], [900, 20]):
        check(torch.tensor([[5]]).int(), torch.tensor(values).int(), None, num_tokens, 64)
    for shape in ((0, 3), (2, 0), (0, 0)):
        check(torch.zeros(shape).int(), torch.zeros(shape[0] + 1).int(), None, num_tokens, 64)


def test_long_sequences():
    bounds = torch.tensor([0, 70_001, 70_001, 200_000]).int()
    table = torch.randint(0, INT_MAX, (3, 3200)).int()
    for lengths in (None, torch.tensor([70_001, 9, 204_000]).int()):
        for options in OPTIONS:
            check(table, bounds, lengths, 200_000, 64, **options)
    far = torch.tensor([INT_MAX]).int()
    for page_size, ratio in ((2**30, 1), (2**30, 2**30), (1, 2**30), (2**29 + 1, 3)):
        for ring in (False, True):
            check(torch.tensor([[3, 4]]).int(), torch.tensor([0, 9]).int(), far, 9, page_size, ratio=ratio, ring=ring)


def test_slots_beyond_2_to_the_31():
    table = torch.tensor([[2**25 - 1, 2**25], [INT_MAX, INT_MIN]]).int()
    got = check(table, torch.tensor([0, 2, 4]).int(), torch.tensor([65, 65]).int(), 4, 64)
    assert got.tolist() == [2**31 - 1, 2**31, INT_MAX * 64 + 63, -1]
    got = check(table[1:, :1], torch.tensor([0, 1]).int(), torch.tensor([2**30]).int(), 1, 2**30)
    assert got.tolist() == [INT_MAX * 2**30 + 2**30 - 1]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("sequences", [8, 17, 1000])
@pytest.mark.parametrize("seed", range(4))
def test_anything_in_the_numbers(seed, sequences, options):
    """Also of more sequences than are compared at once, whose boundaries ascend or do not."""
    torch.manual_seed(seed)
    table, lengths = torch.randint(0, 99, (sequences, 6)).int(), torch.randint(0, 400, (sequences,)).int()
    bounds, edges = boundaries(sequences, 30), sequences + 1
    one_wrong = bounds.clone()
    one_wrong[sequences // 2] = garbage(1)
    for page_size in (1, 64, 2**30):
        check(garbage(sequences, 6), bounds, lengths, 200, page_size, **options)
        check(table, garbage(edges), lengths, 200, page_size, **options)
        check(table, garbage(edges), None, 200, page_size, **options)
        check(table, garbage(edges).sort().values, None, 200, page_size, **options)
        check(table, one_wrong, lengths, 20 * sequences, page_size, **options)
        check(table, torch.where(torch.rand(edges) < 0.3, garbage(edges), bounds), lengths, 200, page_size, **options)
        check(table, bounds, garbage(sequences), 200, page_size, **options)
        check(garbage(sequences, 6), garbage(edges), garbage(sequences), 200, page_size, **options)


def test_strides():
    """Parts of larger tensors, which hold something else beside them."""
    table, bounds = torch.randint(0, 99, (30, 9)).int(), boundaries(30, 20)
    lengths, total = torch.randint(0, 150, (30,)).int(), int(bounds[-1])
    expected = check(table, bounds, lengths, total, 16)
    table, bounds, lengths = table.cuda(), bounds.cuda(), lengths.cuda()
    apart = [torch.stack((x, -x), 1)[:, 0] for x in (bounds, lengths)]
    for other in (torch.nn.functional.pad(table, (1, 2), value=-7)[:, 1:10], table.T.contiguous().T):
        assert torch.equal(dsa.slot_mapping(other, *apart, total, 16), expected)
    once = check(table[:1].repeat(30, 1).cpu(), bounds.cpu(), lengths.cpu(), total, 16)
    assert torch.equal(dsa.slot_mapping(table[:1].expand(30, 9), bounds, lengths, total, 16), once)


def test_graph_replay_with_new_data():
    def renew():
        table, lengths = torch.randint(500, (8, 20)), torch.randint(960, (8,))
        return [x.int().cuda() for x in (table, boundaries(8, 40), lengths)]

    def slots(table, bounds, lengths, mapping=dsa.slot_mapping):
        every = mapping(table, bounds, None, 300, 48)
        return every, *(mapping(table, bounds, lengths, 300, 48, **options) for options in OPTIONS)

    given = renew()
    for got in replays(slots, given, renew, times=5):
        expected = slots(*(x.cpu() for x in given), mapping=reference.slot_mapping)
        assert all(torch.equal(x.cpu(), y) for x, y in zip(got, expected, strict=True))


def test_it_waits_for_what_is_before_it():
    """And what is behind it waits for it, on a stream of its own."""
    table, bounds, lengths, added = int32([[0, 0]]), int32([0, 0]), int32([0]), int32([0, 100])

    def change():
        bounds.add_(added)
        lengths.add_(100)
        table.add_(7)

    def slots_and_total():
        got = dsa.slot_mapping(table, bounds, lengths, 100, 64)
        return got, got.sum()

    got, total = on_a_late_stream(change, slots_and_total)
    assert got.tolist() == [*range(7 * 64, 8 * 64), *range(7 * 64, 7 * 64 + 36)]
    assert int(total) == int(got.sum())


@pytest.mark.several_gpus
def test_tensors_on_another_gpu_than_the_current_one():
    given = int32([[3, 4]]), int32([0, 100]), None
    assert_same_on_the_second_gpu(dsa.slot_mapping, *given, num_tokens=100, page_size=64)
