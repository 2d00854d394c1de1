"""Scaling of queries by a learned function of their position."""

import torch
from torch import nn


class PositionScaling(nn.Module):
    """y[t, h] = (scale[h] * ln(positions[t] + 1) + bias[h]) * x[t, h].

    forward(x [T, heads, D], positions int64 [T]) -> y, in x's dtype. The factor, computed in fp32, sharpens a head's
    softmax in long contexts.
    Parameters: scale, bias fp32 [heads]. Their initial values 0 and 1 give y = x.
    Source: `MistralLarge4TextSoftmaxScaling` of transformers 5.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(heads, dtype=torch.float32))
        self.bias = nn.Parameter(torch.ones(heads, dtype=torch.float32))

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        factor = torch.addcmul(self.bias.float(), self.scale.float(), (positions + 1).float().log()[:, None])
        return (x * factor[..., None]).to(x.dtype)
