"""Parts of the embedding: each has its own tokens' rows and zeros for others, by either way of computing them."""

import pytest
import torch

from dsa.runtime.asked_variants import asked_variants
from dsa_layers.layers.embedding import Embedding


@pytest.mark.parametrize("one_kernel", [False, True])
@pytest.mark.parametrize("shape", [(), (2, 3), (0,)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@torch.inference_mode()
def test_parts_add_up(shape, dtype, one_kernel, monkeypatch):
    monkeypatch.setattr(Embedding, "_in_one_kernel", lambda self: one_kernel)
    whole = Embedding(12, 8, dtype=dtype)
    tokens = torch.randint(12, shape)
    total = torch.zeros_like(whole(tokens))
    for first in range(0, 12, 4):
        part = Embedding(4, 8, dtype=dtype)
        part.vocabulary, part.first = 12, first
        part.weight.data = whole.weight[first : first + 4]
        own = part(tokens)
        assert own.shape == (*shape, 8) and own.dtype == dtype
        inside = (tokens >= first) & (tokens < first + 4)
        assert torch.equal(own, torch.where(inside[..., None], whole(tokens), 0))
        total += own
    assert torch.equal(total, whole(tokens))


@pytest.mark.parametrize("shape", [(), (2, 3)])
@torch.inference_mode()
def test_a_part_on_a_gpu_is_one_kernel(shape):
    """As on a GPU, without memory: a whole asks for none of ours, a part for the one that the test above computes."""
    part = Embedding(4, 8, dtype=torch.bfloat16).to("meta")
    tokens = torch.empty(shape, dtype=torch.int64, device="meta")
    with asked_variants("sm_90") as asked:
        assert part(tokens).shape == (*shape, 8) and not asked
        part.vocabulary, part.first = 12, 4
        assert part(tokens).shape == (*shape, 8)
    assert {variant.function for variant in asked} == {"compile_combine_experts"}
