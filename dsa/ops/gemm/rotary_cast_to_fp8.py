"""Rope on heads and FP8 cast, with the rows ordered by group of heads for the grouped product after attention."""

import torch

from dsa.kernels.gemm.limits import GROUP, ROTARY_MULTIPLE
from dsa.ops.elementwise.rotary import check_rotated
from dsa.reference.gemm import rotary_cast_to_fp8 as reference
from dsa.runtime.declare import (
    F32,
    FLOATS,
    ROWS,
    Arguments,
    Flag,
    Int,
    Tensor,
    dtype_name,
    multiple_of,
    op,
    rows_at_16_bytes,
)

__all__ = ["rotary_cast_to_fp8"]


def _check_heads(x: torch.Tensor, cos: torch.Tensor, groups: int) -> None:
    if x.shape[1] % groups:
        raise ValueError(f"groups: must divide the {x.shape[1]} heads of x, got {groups}")
    check_rotated("x", x, cos)


ROTARY_CAST_TO_FP8 = Arguments(
    limits={"d": multiple_of(GROUP)},
    rule=_check_heads,
    x=Tensor("T H d", FLOATS, layout=ROWS),
    cos=Tensor("T R/2", F32, layout=ROWS),
    sin=Tensor("T R/2", F32, layout=ROWS),
    groups=Int(),
    use_ue8m0=Flag(),
)


def rotary_cast_to_fp8(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, groups: int, use_ue8m0: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row g * T + t of the result is the FP8 cast of R(t) x[t, h] for the heads h of group g: attention's result,
    ordered for a grouped product.

    R(t) rotates the last R channels of each head as pairs of adjacent channels, (a, b) -> (a cos - b sin, a sin + b
    cos) in fp32, rounded to x's dtype. Then each 128 channels get a scale as in `per_token_cast_to_fp8`. The T rows of
    a group are adjacent, and each row concatenates the channels of the group's heads. So the results are activations
    for `grouped_fp8_gemm_nt` with ends T, 2 T, ..., groups * T.

    x          [T, H, d] bf16, fp16 or fp32, d a multiple of 128
    cos, sin   [T, R / 2] fp32, R at most d, for the tokens' positions. With -sin in place of sin the op applies the
               inverse rotation
    groups     number of groups, each of H / groups adjacent heads; divides H
    use_ue8m0  True: a scale is max(amax, 1e-4) / 448, rounded up to a power of two; False: it is not rounded up

    Returns q [groups * T, H / groups * d] float8_e4m3fn and scale [groups * T, H / groups * d / 128] fp32, contiguous.
    Not differentiable. Without tokens the results are empty. Raises TypeError or ValueError for other types, dtypes,
    shapes, strides and devices.
    On Hopper: one kernel, R a multiple of 8, contiguous channels, rows of x, cos and sin at multiples of 16 bytes; the
    same bits as `apply_rotary` and then the cast. CUDA-graph safe, no host synchronisation.
    Source: `Attention` of DeepSeek-V4's inference code, between attention and wo_a.
    """
    return _rotary_cast_to_fp8(x, cos, sin, groups, use_ue8m0)


def _results(x: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, channels = groups * len(x), x.shape[1] // groups * x.shape[2]
    q = torch.empty((rows, channels), dtype=torch.float8_e4m3fn, device=x.device)
    return q, torch.empty((rows, channels // GROUP), dtype=torch.float32, device=x.device)


@op(
    arguments=ROTARY_CAST_TO_FP8,
    reference=reference.rotary_cast_to_fp8,
    results=_results,
    limits={"R/2": multiple_of(ROTARY_MULTIPLE // 2, least=ROTARY_MULTIPLE // 2)},
)
def _rotary_cast_to_fp8(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, groups: int, use_ue8m0: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    from dsa.kernels.gemm.rotary_cast_to_fp8_sm90 import compile_rotary_cast_to_fp8

    q, scale = _results(x, groups)
    if q.numel():
        tokens, heads, dim = x.shape
        places = (groups, tokens, heads // groups)
        launch = compile_rotary_cast_to_fp8(dtype_name(x.dtype), use_ue8m0)
        operands = (rows_at_16_bytes(part) for part in (x, cos, sin))
        launch(*operands, q.view(*places, dim), scale.view(*places, dim // GROUP))
    return q, scale
