"""SwiGLU, or a sigmoid gate, and the FP8 cast of the result, for the next product."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.gemm.fp8_cast import per_token_cast_to_fp8

BLOCK = 128


@torch.no_grad()
@without_autocast
def swiglu_cast_to_fp8(
    gate: torch.Tensor,
    up: torch.Tensor,
    use_ue8m0: bool = True,
    *,
    limit: float | None = None,
    pad_scales: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`per_token_cast_to_fp8(h, use_ue8m0)` with h = silu(gate) * up, computed in fp32 and rounded to gate's dtype.

    With `limit`, first gate = min(gate, limit) and up = clamp(up, -limit, limit). The last block of channels may have
    fewer than 128. Arguments as in `dsa.swiglu_cast_to_fp8`.
    Source: `Expert` and `act_quant` of DeepSeek-V3.2's inference code, the limit from DeepSeek-V4's.
    """
    g, u = gate.float(), up.float()
    if limit is not None:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    return _cast((torch.nn.functional.silu(g) * u).to(gate.dtype), use_ue8m0, pad_scales)


@torch.no_grad()
@without_autocast
def gate_cast_to_fp8(
    gate: torch.Tensor, x: torch.Tensor, use_ue8m0: bool = True, *, pad_scales: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """`per_token_cast_to_fp8(h, use_ue8m0)` with h = sigmoid(gate) * x, computed in fp32 and rounded to gate's dtype.

    The last block of channels may have fewer than 128. Arguments as in `dsa.gate_cast_to_fp8`.
    """
    return _cast((torch.sigmoid(gate.float()) * x.float()).to(gate.dtype), use_ue8m0, pad_scales)


def _cast(h: torch.Tensor, use_ue8m0: bool, pad_scales: bool) -> tuple[torch.Tensor, torch.Tensor]:
    channels, multiple = h.shape[-1], 4 * BLOCK if pad_scales else BLOCK
    # Padding with zeros does not change a block's scale.
    q, scale = per_token_cast_to_fp8(torch.nn.functional.pad(h, (0, -channels % multiple)), use_ue8m0)
    return q[..., :channels].contiguous(), scale
