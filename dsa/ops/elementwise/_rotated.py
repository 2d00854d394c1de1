"""What ops with a rotary position embedding check alike."""

import torch

DIMS = ("first", "last")


def check_rotated(name: str, x: torch.Tensor, cos: torch.Tensor) -> None:
    """x, the argument `name`, has the channels that cos turns."""
    if 2 * cos.shape[1] > x.shape[-1]:
        raise ValueError(
            f"{name}: the last dimension must be at least {2 * cos.shape[1]} for these cos and sin, got {x.shape[-1]}"
        )
