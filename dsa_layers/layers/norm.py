"""RMSNorm, LayerNorm and A.X-K2's gated RMSNorm, computed in fp32."""

import torch
from torch import nn

import dsa
from dsa_layers.layers.linear import Linear


class RMSNorm(nn.RMSNorm):
    """y = x / sqrt(mean(x^2) + eps) * scale * weight over the last dimension.

    x [..., dim] is bf16, fp16 or fp32, and y has x's dtype. Parameter: weight [dim], fp32.
    """

    def __init__(self, dim: int, eps: float = 1e-6, scale: float = 1.0) -> None:
        super().__init__(dim, eps, dtype=torch.float32)
        self.scale = scale

    @property
    def gain(self) -> torch.Tensor:
        """scale * weight, fp32 [dim]."""
        weight = self.weight.float()
        return weight if self.scale == 1 else weight * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return dsa.rms_norm(x, self.gain, self.eps)


class LayerNorm(nn.LayerNorm):
    """y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dimension.

    x [..., dim] has any float dtype, and y has x's dtype. Parameters: weight and bias [dim], fp32.
    """

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__(dim, eps, dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight.float(), self.bias.float()
        return nn.functional.layer_norm(x.float(), self.normalized_shape, weight, bias, self.eps).to(x.dtype)


class GatedRMSNorm(nn.Module):
    """y = n * sigmoid(W_up silu(W_down n)), n = RMSNorm(x).

    x [..., dim] in `dtype` -> y [..., dim]. Parameters: norm; W_down [rank, dim], W_up [dim, rank] in `dtype`.
    Source: `AXK2GatedRMSNorm` of transformers 5.
    """

    def __init__(self, dim: int, rank: int, eps: float = 1e-6, *, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.norm = RMSNorm(dim, eps)
        self.W_down, self.W_up = Linear(dim, rank, dtype=dtype), Linear(rank, dim, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        gate = self.W_up(nn.functional.silu(self.W_down(y)))
        return (y * gate.float().sigmoid()).to(y.dtype)
