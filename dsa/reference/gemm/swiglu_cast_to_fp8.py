"""SwiGLU whose result is cast to FP8 for the projection behind it."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.checks import (
    FLOATS,
    check_flag,
    check_memory,
    check_number,
    check_same_device,
    check_same_dtype,
    check_tensor,
    shape_of,
)
from dsa.reference.gemm.fp8_cast import per_token_cast_to_fp8

BLOCK = 128


@torch.no_grad()
@without_autocast
def swiglu_cast_to_fp8(
    gate: torch.Tensor, up: torch.Tensor, use_ue8m0: bool = True, *, limit: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`per_token_cast_to_fp8(h, use_ue8m0)` of h = silu(gate) * up, from fp32 rounded to the operands' dtype.

    gate, up  [..., I] of one float dtype
    limit     gate is at most that, up between -limit and limit, a finite number above 0; None: any

    Returns q [..., I] e4m3 and scale [..., ceil(I / 128)] fp32: the last block of channels may be ragged. NaN in a
    block makes its scale and values NaN; infinity makes the scale infinite.
    Source: `Expert` and `act_quant` of DeepSeek-V3.2's inference code, the limit from DeepSeek-V4's.
    """
    check(gate, up, use_ue8m0, limit)
    check_memory("gate", gate)
    channels = gate.shape[-1]
    g, u = gate.float(), up.float()
    if limit is not None:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    h = (torch.nn.functional.silu(g) * u).to(gate.dtype)
    # Zeros do not change a block's scale.
    q, scale = per_token_cast_to_fp8(torch.nn.functional.pad(h, (0, -channels % BLOCK)), use_ue8m0)
    return q[..., :channels].contiguous(), scale


def check(gate: torch.Tensor, up: torch.Tensor, use_ue8m0: bool, limit: float | None) -> None:
    """The checks of `swiglu_cast_to_fp8`."""
    check_tensor("gate", gate, FLOATS, shape_of(gate))
    if gate.dim() == 0:
        raise ValueError("gate: shape must be [..., I], got []")
    check_tensor("up", up, FLOATS, tuple(gate.shape), "gate")
    check_same_dtype(("gate", gate), up=up)
    check_same_device(("gate", gate), up=up)
    check_flag("use_ue8m0", use_ue8m0)
    if limit is not None:
        check_number("limit", limit)
        if limit <= 0:
            raise ValueError(f"limit: must be positive or None, got {limit}")
