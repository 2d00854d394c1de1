"""SwiGLU whose result is cast to FP8 for the projection behind it."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.gemm.fp8_cast import per_token_cast_to_fp8
from dsa.runtime.arguments import ROWS, Arguments, Flag, Number, Tensor
from dsa.runtime.checks import FLOATS, check_memory

BLOCK = 128


def check_limit(limit: float | None) -> None:
    """The rule of SwiGLU's clamp."""
    if limit is not None and limit <= 0:
        raise ValueError(f"limit: must be positive or None, got {limit}")


SWIGLU_CAST_TO_FP8 = Arguments(
    rule=check_limit,
    gate=Tensor("... I", FLOATS, layout=ROWS, merged=(0, -1)),
    up=Tensor("... I", FLOATS, like="gate", layout=ROWS, merged=(0, -1)),
    use_ue8m0=Flag(),
    limit=Number(optional=True),
)


@torch.no_grad()
@without_autocast
def swiglu_cast_to_fp8(
    gate: torch.Tensor, up: torch.Tensor, use_ue8m0: bool = True, *, limit: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`per_token_cast_to_fp8(h, use_ue8m0)` of h = silu(gate) * up, from fp32 rounded to the operands' dtype.

    The last block of channels may be ragged. Arguments as of `dsa.swiglu_cast_to_fp8`.
    Source: `Expert` and `act_quant` of DeepSeek-V3.2's inference code, the limit from DeepSeek-V4's.
    """
    SWIGLU_CAST_TO_FP8.check(gate, up, use_ue8m0, limit)
    check_memory("gate", gate)
    channels = gate.shape[-1]
    g, u = gate.float(), up.float()
    if limit is not None:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    h = (torch.nn.functional.silu(g) * u).to(gate.dtype)
    # Zeros do not change a block's scale.
    q, scale = per_token_cast_to_fp8(torch.nn.functional.pad(h, (0, -channels % BLOCK)), use_ue8m0)
    return q[..., :channels].contiguous(), scale
