"""Root mean square norm."""

import torch

from dsa.reference.autocast import without_autocast


@without_autocast
def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float = 1e-6) -> torch.Tensor:
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension, in fp32, rounded once. Arguments as in
    `dsa.rms_norm`."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight).to(x.dtype).contiguous()


def rms_norm_gradient(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (dx, dw [1, D] fp32) of `rms_norm` for the upstream gradient g = grad.

    With r = 1 / sqrt(mean(x^2) + eps) and w = weight, or 1 if weight is None: dx = r (g w - x r^2 mean(g w x)), rounded
    once to x's dtype. dw is the sum of g x r over the rows, or zeros if weight is None.
    """
    g, y = grad.float(), x.float()
    r = torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    gained = g if weight is None else g * weight
    dx = r * (gained - y * r.square() * (gained * y).mean(-1, keepdim=True))
    dw = (g * y * r).flatten(0, -2).sum(0, keepdim=True) if x.dim() > 1 else (g * y * r)[None]
    return dx.to(x.dtype).contiguous(), torch.zeros_like(dw) if weight is None else dw
