"""The training ops on a CPU are their references; on a GPU they say once that they are nothing else yet."""

import pytest
import torch

import dsa
import reference
from dsa import backends

NAMES = "indexer_warmup_attention", "sparse_indexer_loss"


@pytest.mark.parametrize("name", NAMES)
def test_they_are_documented_as_the_references(name):
    assert getattr(dsa, name).__doc__ == getattr(reference, name).__doc__


def test_a_hopper_gpu_is_told(monkeypatch):
    noted = []
    monkeypatch.setattr(backends, "note_reference_only", lambda name, tensor: noted.append(name))
    q, kv, indices = torch.randn(2, 3, 8), torch.randn(4, 1, 8), torch.zeros(2, 1, 2, dtype=torch.int32)
    q_idx, k_idx, w_idx = torch.randn(2, 2, 4), torch.randn(4, 4), torch.randn(2, 2)
    kl = dsa.sparse_indexer_loss(q, kv, q_idx, k_idx, w_idx, indices, 0.3)
    assert kl.shape == (2,) and noted == ["sparse_indexer_loss"]
