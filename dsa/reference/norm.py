"""Root mean square norm."""

import torch

from .checks import FLOATS, check_tensor


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float = 1e-6) -> torch.Tensor:
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    x [..., D] float; weight [D] fp32, or None for ones. fp32 inside; returns x's shape and dtype.
    """
    check_rms_norm(x, weight)
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight).to(x.dtype)


def check_rms_norm(x: torch.Tensor, weight: torch.Tensor | None) -> None:
    """The checks of `rms_norm`."""
    check_tensor("x", x, FLOATS, tuple(x.shape) if isinstance(x, torch.Tensor) else ())
    if x.dim() == 0:
        raise ValueError("x: must have at least 1 dimension, got shape []")
    if weight is not None:
        check_tensor("weight", weight, (torch.float32,), (x.shape[-1],))
