"""Root mean square norm of heads, with rotary position embedding behind it."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.elementwise.rms_norm import rms_norm
from dsa.reference.elementwise.rotary import apply_rotary, check_rotated
from dsa.runtime.arguments import F32, ROWS, Arguments, Number, Tensor
from dsa.runtime.checks import FLOATS


def _check_channels(x: torch.Tensor, cos: torch.Tensor) -> None:
    check_rotated("x", x, cos)


RMS_NORM_ROTARY = Arguments(
    rule=_check_channels,
    x=Tensor("T H D", FLOATS, layout=ROWS),
    weight=Tensor("D", F32, optional=True, layout=ROWS),
    cos=Tensor("T R/2", F32, layout=ROWS),
    sin=Tensor("T R/2", F32, layout=ROWS),
    eps=Number(least=0),
)


@without_autocast
def rms_norm_rotary(
    x: torch.Tensor, weight: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, eps: float = 1e-6
) -> torch.Tensor:
    """`rms_norm` over the last dimension, and `apply_rotary` of its last channels, pairs of neighbours. Arguments as of
    `dsa.rms_norm_rotary`."""
    RMS_NORM_ROTARY.check(x, weight, cos, sin, eps)
    return apply_rotary(rms_norm(x, weight, eps), cos, sin, interleaved=True, dims="last")
