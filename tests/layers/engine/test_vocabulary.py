"""A rank's embedding (`SplitEmbedding`) returns rows for the rank's tokens and zeros for others."""

from types import SimpleNamespace

import pytest
import torch

from dsa_layers.engine import split
from dsa_layers.parallel.ranks import Ranks


@pytest.mark.parametrize("one_kernel", [False, True])
@pytest.mark.parametrize("shape", [(), (2, 3), (0,)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@torch.inference_mode()
def test_the_ranks_embeddings_add_up(shape, dtype, one_kernel, monkeypatch):
    monkeypatch.setattr(split, "backends", SimpleNamespace(runs_kernel=lambda *_: one_kernel))
    monkeypatch.setattr(Ranks, "sum", lambda self, x: x)  # no sum, so that `part` returns one rank's result
    whole = torch.nn.Embedding(12, 8, dtype=dtype)
    tokens = torch.randint(12, shape)
    total = torch.zeros_like(whole(tokens))
    for rank in range(3):
        part = split.SplitEmbedding(4, 8, dtype=dtype)
        part.ranks, part.weight.data = Ranks(rank, 3), whole.weight[4 * rank : 4 * rank + 4]
        own = part(tokens)
        assert own.shape == (*shape, 8) and own.dtype == dtype
        assert torch.equal(own, torch.where((tokens // 4 == rank)[..., None], whole(tokens), 0))
        total += own
    assert torch.equal(total, whole(tokens))
