"""Rotary position embedding of queries, keys or attention outputs."""

import torch

from dsa.reference.autocast import without_autocast


@without_autocast
def apply_rotary(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool, dims: str = "first"
) -> torch.Tensor:
    """Rotate the first or last R = 2 * cos.shape[-1] channels of x; copy the other channels.

    (a, b) -> (a cos - b sin, a sin + b cos) on the pairs (2i, 2i + 1) of the R channels if `interleaved`, else (i, i +
    R / 2), in fp32, rounded once to x's dtype. Gradients flow to x, cos and sin. Arguments as in `dsa.apply_rotary`;
    the reference has no `out`.
    """
    rotated = 2 * cos.shape[-1]
    if rotated == 0:
        return x.clone(memory_format=torch.contiguous_format)
    still = x.shape[-1] - rotated
    part, rest = (x[..., :rotated], x[..., rotated:]) if dims == "first" else (x[..., still:], x[..., :still])
    shape = (x.shape[0],) + (1,) * (x.dim() - 2) + (cos.shape[-1],)
    cos, sin = cos.view(shape), sin.view(shape)
    a, b = part.float().unflatten(-1, (-1, 2)).unbind(-1) if interleaved else part.float().chunk(2, -1)
    pair = (a * cos - b * sin, a * sin + b * cos)
    new = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    new = new.to(x.dtype)
    return torch.cat((new, rest) if dims == "first" else (rest, new), -1)
