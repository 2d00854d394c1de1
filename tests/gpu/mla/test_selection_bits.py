"""Selections' bits on the GPU: exactly the reference's, whatever the lists hold."""

import pytest
import torch

import dsa
from dsa.reference.mla import selection_bits as reference
from dsa.testing import poison_free_memory


def check(indices, starts, max_keys):
    poison_free_memory(mebibytes=64)
    got = dsa.selection_bits(indices.cuda(), None if starts is None else starts.cuda(), max_keys)
    assert torch.equal(got.cpu(), reference.selection_bits(indices, starts, max_keys))


@pytest.mark.parametrize("max_keys", [1, 127, 128, 129, 5000, 262144, 300000])
@pytest.mark.parametrize("k", [1, 33, 512, 2048])
def test_lists(k, max_keys):
    starts = torch.randint(0, 1000, (40,), dtype=torch.int32)
    indices = starts[:, None] + torch.randint(-5, max_keys + 5, (40, k), dtype=torch.int32)
    check(indices, starts, max_keys)
    check(indices[:, : k // 2], starts, max_keys)
    check(indices - starts[:, None], None, max_keys)


def test_hostile_lists():
    values = torch.tensor([-(2**31), -(2**31) + 1, -1, 0, 1, 127, 128, 2**31 - 2, 2**31 - 1])
    indices = values[torch.randint(len(values), (200, 70))].int()
    check(indices, values[torch.randint(len(values), (200,))].int(), 1000)


def test_strides_and_nothing():
    indices, starts = torch.randint(0, 300, (20, 64), dtype=torch.int32), torch.zeros(20, dtype=torch.int32)
    wide = torch.full((20, 100), 7, dtype=torch.int32)
    wide[:, :64] = indices
    got = dsa.selection_bits(wide.cuda()[:, :64], torch.zeros(40, dtype=torch.int32, device="cuda")[::2], 300)
    assert torch.equal(got.cpu(), reference.selection_bits(indices, starts, 300))
    check(indices[:0], starts[:0], 300)
    check(indices, starts, 0)


def test_graph_replay():
    indices, starts = (torch.zeros(n, dtype=torch.int32, device="cuda") for n in ((50, 128), (50,)))
    dsa.selection_bits(indices, starts, 900)
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        got = dsa.selection_bits(indices, starts, 900)
    for _ in range(3):
        indices.random_(0, 1000)
        starts.random_(0, 100)
        graph.replay()
        assert torch.equal(got.cpu(), reference.selection_bits(indices.cpu(), starts.cpu(), 900))
