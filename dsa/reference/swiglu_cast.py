"""SwiGLU whose result is cast to FP8 for the projection behind it."""

import torch

from .checks import FLOATS, check_tensor
from .fp8_cast import per_token_cast_to_fp8

BLOCK = 128


def swiglu_cast_to_fp8(
    gate: torch.Tensor, up: torch.Tensor, use_ue8m0: bool = True, *, limit: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`per_token_cast_to_fp8(h, use_ue8m0)` of h = silu(gate) * up, from fp32 rounded to the operands' dtype.

    gate, up  [..., I] of one float dtype
    limit     gate is at most that, up between -limit and limit; None: any

    Returns q [..., I] e4m3 and scale [..., ceil(I / 128)] fp32: the last block of channels may be ragged. NaN in a
    block makes its scale and values NaN; infinity makes the scale infinite.
    Source: `Expert` and `act_quant` of DeepSeek-V3.2's inference code, the limit from DeepSeek-V4's.
    """
    check(gate, up, limit)
    channels = gate.shape[-1]
    g, u = gate.float(), up.float()
    if limit is not None:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    h = (torch.nn.functional.silu(g) * u).to(gate.dtype)
    # Zeros do not change a block's scale.
    q, scale = per_token_cast_to_fp8(torch.nn.functional.pad(h, (0, -channels % BLOCK)), use_ue8m0)
    return q[..., :channels].contiguous(), scale


def check(gate: torch.Tensor, up: torch.Tensor, limit: float | None) -> None:
    """Types, dtypes, shapes and the limit of `swiglu_cast_to_fp8`."""
    check_tensor("gate", gate, FLOATS, gate.shape if isinstance(gate, torch.Tensor) else ())
    if gate.dim() == 0:
        raise ValueError("gate: shape must be [..., I], got []")
    check_tensor("up", up, (gate.dtype,), gate.shape)
    if limit is None:
        return
    if isinstance(limit, bool) or not isinstance(limit, int | float):
        raise TypeError(f"limit: must be a number or None, got {type(limit).__name__}")
    if not limit > 0:  # NaN is not
        raise ValueError(f"limit: must be positive or None, got {limit}")
