"""Rotary position embedding applied to queries or keys."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.runtime.arguments import F32, INNER, Arguments, Choice, Flag, Tensor
from dsa.runtime.checks import FLOATS, check_memory

DIMS = ("first", "last")


def check_rotated(name: str, x: torch.Tensor, cos: torch.Tensor) -> None:
    """x, the argument `name`, has the channels that cos turns."""
    if 2 * cos.shape[1] > x.shape[-1]:
        raise ValueError(
            f"{name}: the last dimension must be at least {2 * cos.shape[1]} for these cos and sin, got {x.shape[-1]}"
        )


def _check_channels(x: torch.Tensor, cos: torch.Tensor) -> None:
    check_rotated("x", x, cos)


ROTARY = Arguments(
    rule=_check_channels,
    x=Tensor("T ... D", FLOATS, layout=INNER, merged=(1, -1)),
    cos=Tensor("T R/2", F32),
    sin=Tensor("T R/2", F32),
    interleaved=Flag(),
    dims=Choice(DIMS),
)
OUT = {"out": Tensor("T ... D", FLOATS, like="x", layout=INNER, merged=(1, -1))}


@without_autocast
def apply_rotary(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool, dims: str = "first"
) -> torch.Tensor:
    """Rotate the first or last R = 2 * cos.shape[-1] dimensions of x; the others are copied.

    (a, b) -> (a cos - b sin, a sin + b cos) on the pairs (2i, 2i + 1) if `interleaved`, else (i, i + R / 2), in fp32,
    rounded once to x's dtype. Gradients flow to x, cos and sin. Arguments as of `dsa.apply_rotary`.
    """
    ROTARY.check(x, cos, sin, interleaved, dims)
    check_memory("x", x)
    rotated = 2 * cos.shape[-1]
    if rotated == 0:
        return x.clone(memory_format=torch.contiguous_format)
    still = x.shape[-1] - rotated
    part, rest = (x[..., :rotated], x[..., rotated:]) if dims == "first" else (x[..., still:], x[..., :still])
    shape = (x.shape[0],) + (1,) * (x.dim() - 2) + (cos.shape[-1],)
    cos, sin = cos.view(shape), sin.view(shape)
    a, b = part.float().unflatten(-1, (-1, 2)).unbind(-1) if interleaved else part.float().chunk(2, -1)
    pair = (a * cos - b * sin, a * sin + b * cos)
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    turned = turned.to(x.dtype)
    return torch.cat((turned, rest) if dims == "first" else (rest, turned), -1)
