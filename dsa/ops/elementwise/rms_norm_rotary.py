"""Root mean square norm of query heads, and then rotary position embedding."""

import torch

from dsa.kernels.elementwise.limits import CHANNEL_MULTIPLE, MAX_NORM_ROTARY_CHANNELS, MAX_NORM_ROWS
from dsa.ops.elementwise.rotary import check_channels
from dsa.reference.elementwise import rms_norm_rotary as reference
from dsa.runtime.declare import (
    F32,
    FLOATS,
    ROWS,
    Arguments,
    Number,
    Tensor,
    at_most,
    dtype_name,
    multiple_of,
    op,
    rows_at_16_bytes,
)

__all__ = ["rms_norm_rotary"]

RMS_NORM_ROTARY = Arguments(
    rule=check_channels,
    x=Tensor("T H D", FLOATS, layout=ROWS),
    weight=Tensor("D", F32, optional=True, layout=ROWS),
    cos=Tensor("T R/2", F32, layout=ROWS),
    sin=Tensor("T R/2", F32, layout=ROWS),
    eps=Number(least=0),
)


def rms_norm_rotary(
    x: torch.Tensor, weight: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, eps: float = 1e-6
) -> torch.Tensor:
    """y[t, h] = R(t) (x[t, h] / sqrt(mean(x[t, h]^2) + eps) * weight): V4's norm of each query head, and its rope.

    The norm is computed in fp32 and rounded to x's dtype. Then R(t) rotates the last R channels, as pairs of adjacent
    channels (a, b) -> (a cos - b sin, a sin + b cos), in fp32, and rounds again.

    x         [T, H, D] bf16, fp16 or fp32
    weight    [D] fp32, or None for ones
    cos, sin  [T, R / 2] fp32, R at most D, for the tokens' positions
    eps       added to the mean of the squares: a finite number, at least 0

    Returns y, contiguous, in x's shape and dtype. Differentiable: if gradients are asked for, the formula runs in
    PyTorch. Raises TypeError or ValueError for other types, dtypes, shapes, strides and devices.
    On Hopper: one kernel that reads x once and writes y once. D a multiple of 8 up to 1024 (fp32: 512); R a multiple of
    8; contiguous channels; rows of x, cos and sin at any multiples of 16 bytes. The bits are those of `dsa.rms_norm`
    and then `dsa.apply_rotary`. Deterministic; a row's result does not depend on the other rows. CUDA-graph safe, no
    host synchronisation.
    Source: `Attention` of DeepSeek-V4's inference code, after wq_b.
    """
    return _rms_norm_rotary(x, weight, cos, sin, eps)


def _results(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@op(
    arguments=RMS_NORM_ROTARY,
    reference=reference.rms_norm_rotary,
    results=_results,
    limits={
        "T*H": at_most(MAX_NORM_ROWS),
        "D": multiple_of(CHANNEL_MULTIPLE, least=CHANNEL_MULTIPLE),
        "D*itemsize": at_most(2 * MAX_NORM_ROTARY_CHANNELS["bfloat16"]),
        "R/2": multiple_of(CHANNEL_MULTIPLE // 2, least=CHANNEL_MULTIPLE // 2),
    },
    differentiable=True,
)
def _rms_norm_rotary(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    from dsa.kernels.elementwise.rms_norm_sm90 import ROTARY_CONFIGS, choose_config, compile_rms_norm_rotary

    out = _results(x)
    if out.numel():
        name = dtype_name(x.dtype)
        launch = compile_rms_norm_rotary(name, weight is not None, choose_config(name, x.shape[2], ROTARY_CONFIGS))
        launch(rows_at_16_bytes(x), weight, rows_at_16_bytes(cos), rows_at_16_bytes(sin), out, float(eps))
    return out
