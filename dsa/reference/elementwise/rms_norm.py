"""Root mean square norm."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.checks import FLOATS, check_memory, check_number, check_same_device, check_tensor, shape_of


@without_autocast
def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float = 1e-6) -> torch.Tensor:
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    x [..., D] float; weight [D] fp32, or None for ones; eps a finite number, at least 0. fp32 inside; returns x's shape
    and dtype.
    """
    check_rms_norm(x, weight, eps)
    check_memory("x", x)
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight).to(x.dtype)


def check_rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> None:
    """The checks of `rms_norm`."""
    check_tensor("x", x, FLOATS, shape_of(x))
    if x.dim() == 0:
        raise ValueError("x: must have at least 1 dimension, got shape []")
    if weight is not None:
        check_tensor("weight", weight, (torch.float32,), (x.shape[-1],), "x")
    check_number("eps", eps, 0)
    check_same_device(("x", x), weight=weight)
