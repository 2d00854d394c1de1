"""Heads rotated and cast to FP8, by groups of heads."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.elementwise.rotary import apply_rotary, check_rotated
from dsa.reference.gemm.fp8_cast import per_token_cast_to_fp8
from dsa.runtime.arguments import F32, ROWS, Arguments, Flag, Int, Tensor
from dsa.runtime.checks import FLOATS, check_memory

GROUP = 128  # channels that share a scale


def _check(x: torch.Tensor, cos: torch.Tensor, groups: int) -> None:
    if x.shape[2] % GROUP:
        raise ValueError(f"x: the last dimension must be a multiple of {GROUP}, got shape {list(x.shape)}")
    if x.shape[1] % groups:
        raise ValueError(f"groups: must divide the {x.shape[1]} heads of x, got {groups}")
    check_rotated("x", x, cos)


ROTARY_CAST_TO_FP8 = Arguments(
    rule=_check,
    x=Tensor("T H d", FLOATS, layout=ROWS),
    cos=Tensor("T R/2", F32, layout=ROWS),
    sin=Tensor("T R/2", F32, layout=ROWS),
    groups=Int(),
    use_ue8m0=Flag(),
)


@torch.no_grad()
@without_autocast
def rotary_cast_to_fp8(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, groups: int, use_ue8m0: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """`apply_rotary` of the last channels, pairs of neighbours, and `per_token_cast_to_fp8` of the heads of each of
    `groups`, group after group. Arguments as of `dsa.rotary_cast_to_fp8`."""
    ROTARY_CAST_TO_FP8.check(x, cos, sin, groups, use_ue8m0)
    check_memory("x", x)
    turned = apply_rotary(x, cos, sin, interleaved=True, dims="last")
    rows = turned.unflatten(1, (groups, x.shape[1] // groups)).transpose(0, 1).flatten(2).flatten(0, 1)
    return per_token_cast_to_fp8(rows, use_ue8m0)
