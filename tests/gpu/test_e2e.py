"""Check `peer_slots.to_slots`, which the benchmark of whole passes runs with the peers' kernels. It converts selected
positions to cache slots."""

import pytest
import torch

from dsa_bench.e2e import peer_slots


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize(("rows", "k"), [(1, 2048), (130, 512), (9, 1500)])
def test_slots_of_a_selection(rows, k, by_row):
    pytest.importorskip("triton")  # included in PyTorch's builds for GPUs
    page_size, pages, sequences = 64, 300, 7 if by_row else rows
    indices = torch.randint(-1, page_size * pages, (rows, k), dtype=torch.int32)
    indices[:, ::5] = -1
    wider = torch.randint(2**24, (sequences, pages + 3), dtype=torch.int32)
    own = (torch.randint(sequences, (rows,), dtype=torch.int32),) if by_row else ()
    on_gpu = [x.cuda() for x in own]
    for columns in (pages, pages + 3):
        expected = peer_slots.to_slots(indices, wider[:, :columns], page_size, *own)
        got = peer_slots.to_slots(indices.cuda(), wider.cuda()[:, :columns], page_size, *on_gpu)
        assert torch.equal(got.cpu(), expected) and (expected == -1).any() and (expected > 2**24).any()
