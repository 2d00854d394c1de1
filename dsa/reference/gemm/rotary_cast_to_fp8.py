"""Rotary embedding of heads, followed by the FP8 cast of each group of heads."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.elementwise.rotary import apply_rotary
from dsa.reference.gemm.fp8_cast import per_token_cast_to_fp8


@torch.no_grad()
@without_autocast
def rotary_cast_to_fp8(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, groups: int, use_ue8m0: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """`apply_rotary` on adjacent pairs of the last channels, then `per_token_cast_to_fp8` of each group of heads.

    Row g * T + t of the result is group g of token t. Arguments as in `dsa.rotary_cast_to_fp8`.
    """
    rotated = apply_rotary(x, cos, sin, interleaved=True, dims="last")
    rows = rotated.unflatten(1, (groups, x.shape[1] // groups)).transpose(0, 1).flatten(2).flatten(0, 1)
    return per_token_cast_to_fp8(rows, use_ue8m0)
