"""RMS norm of heads, followed by rotary position embedding."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.elementwise.rms_norm import rms_norm
from dsa.reference.elementwise.rotary import apply_rotary


@without_autocast
def rms_norm_rotary(
    x: torch.Tensor, weight: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, eps: float = 1e-6
) -> torch.Tensor:
    """`rms_norm`, and then `apply_rotary` on adjacent pairs of the last channels.

    Arguments as in `dsa.rms_norm_rotary`.
    """
    return apply_rotary(rms_norm(x, weight, eps), cos, sin, interleaved=True, dims="last")
