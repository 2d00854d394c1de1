"""What tests of checkpoints share."""

import pytest
import torch

from dsa import per_block_cast_to_fp8


@pytest.fixture
def shards():
    generator = torch.Generator().manual_seed(0)
    q, scale = per_block_cast_to_fp8(torch.randn(576, 256, generator=generator))
    first = {"embed.weight": torch.randn(6, 4, generator=generator).bfloat16(), "layer.proj.weight": q}
    second = {"layer.proj.weight_scale_inv": scale, "layer.ids": torch.arange(5), "norm.weight": torch.ones(4)}
    return first, second
