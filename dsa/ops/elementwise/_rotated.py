"""The checks that ops with a rotary position embedding share."""

import torch

DIMS = ("first", "last")


def check_rotated(name: str, x: torch.Tensor, cos: torch.Tensor) -> None:
    """Raise ValueError where the argument `name` has fewer channels than cos and sin rotate."""
    if 2 * cos.shape[1] > x.shape[-1]:
        raise ValueError(
            f"{name}: the last dimension must be at least {2 * cos.shape[1]} for these cos and sin, got {x.shape[-1]}"
        )
