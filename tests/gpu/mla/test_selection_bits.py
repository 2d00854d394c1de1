"""Selections' bits on the GPU: exactly the reference's, whatever the lists hold."""

import pytest
import torch

import dsa
from dsa.reference.mla import selection_bits as reference
from dsa.testing import poison_free_memory
from tests.gpu.op_checks import replays


def check(indices, starts, max_keys):
    poison_free_memory(mebibytes=64)
    got = dsa.selection_bits(indices.cuda(), None if starts is None else starts.cuda(), max_keys)
    assert torch.equal(got.cpu(), reference.selection_bits(indices, starts, max_keys))


@pytest.mark.parametrize("max_keys", [0, 1, 127, 128, 129, 5000, 300000])
@pytest.mark.parametrize("k", [1, 33, 2048])
def test_bits_are_the_references(k, max_keys):
    starts = torch.randint(0, 1000, (40,), dtype=torch.int32)
    indices = starts[:, None] + torch.randint(-5, max_keys + 5, (40, k), dtype=torch.int32)
    check(indices, starts, max_keys)
    check(indices[:, : k // 2], starts, max_keys)
    check(indices - starts[:, None], None, max_keys)
    check(indices[:0], starts[:0], max_keys)


def test_numbers_near_the_ends_of_int32_set_the_references_bits():
    values = torch.tensor([-(2**31), -(2**31) + 1, -1, 0, 1, 127, 128, 2**31 - 2, 2**31 - 1])
    indices = values[torch.randint(len(values), (200, 70))].int()
    check(indices, values[torch.randint(len(values), (200,))].int(), 1000)


def test_a_graph_takes_new_lists():
    given = torch.zeros(50, 128, dtype=torch.int32, device="cuda"), torch.zeros(50, dtype=torch.int32, device="cuda")

    def renew():
        return torch.randint(0, 1000, (50, 128)), torch.randint(0, 100, (50,))

    for got in replays(dsa.selection_bits, given, renew, max_keys=900):
        assert torch.equal(got.cpu(), reference.selection_bits(*(x.cpu() for x in given), 900))
