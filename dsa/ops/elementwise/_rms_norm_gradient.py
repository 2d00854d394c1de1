"""The gradients of `rms_norm`: a kernel writes dx and partial sums of dw, and torch adds the partial sums."""

import torch

from dsa.kernels.elementwise.limits import CHANNEL_MULTIPLE, MAX_NORM_GRADIENT_CHANNELS, MAX_NORM_GRADIENT_ROWS
from dsa.reference.elementwise import rms_norm as reference
from dsa.runtime import backends
from dsa.runtime.declare import (
    F32,
    FLOATS,
    ROWS,
    Arguments,
    Number,
    Tensor,
    dtype_name,
    op,
    rows_at_16_bytes,
    with_dims,
)

_MAX_CHANNELS = {getattr(torch, name): channels for name, channels in MAX_NORM_GRADIENT_CHANNELS.items()}

RMS_NORM_GRADIENT = Arguments(
    grad=Tensor("... D", FLOATS),
    x=Tensor("... D", FLOATS, layout=ROWS, merged=(0, -2)),
    weight=Tensor("D", F32, optional=True, layout=ROWS),
    eps=Number(least=0),
)


def has_kernel(x: torch.Tensor) -> bool:
    """Whether the kernel can compute the gradients of `rms_norm` for x."""
    if torch.compiler.is_compiling() or x.dim() == 0 or not _rms_norm_gradient.runs_kernel(x):
        return False
    channels = x.shape[-1]
    fits = 0 < channels <= _MAX_CHANNELS.get(x.dtype, 0) and channels % CHANNEL_MULTIPLE == 0
    if not fits or not 0 < x.numel() // channels <= MAX_NORM_GRADIENT_ROWS:
        return False
    return rows_at_16_bytes(x) is not None and (x.dim() <= 3 or x.is_contiguous())


def _results(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(1, x.shape[-1], dtype=torch.float32)


@op(
    arguments=RMS_NORM_GRADIENT,
    reference=reference.rms_norm_gradient,
    results=_results,
    public="rms_norm",
)
def _rms_norm_gradient(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (dx [..., D], dw [1, D] fp32). dw is zeros if weight is None. x must be one that `has_kernel` accepts."""
    from dsa.kernels.elementwise import rms_norm_gradient_sm90 as kernel

    name, channels = dtype_name(x.dtype), x.shape[-1]
    rows, dx, _ = with_dims(rows_at_16_bytes(x), 3), *_results(x)
    config = kernel.choose_config(name, channels, kernel.GRADIENT_CONFIGS)
    ctas = kernel.choose_ctas(rows.shape[0] * rows.shape[1], config, backends.num_sms(x.device))
    parts = None
    if weight is not None:
        parts = x.new_empty(ctas * (config.threads // config.lanes), channels, dtype=torch.float32)
    grad = grad.contiguous()
    if rows_at_16_bytes(grad) is None:  # a contiguous slice of a larger gradient can begin at any element
        grad = grad.clone()
    launch = kernel.compile_rms_norm_gradient(name, weight is not None, config)
    launch(grad.view(rows.shape), rows, weight, dx.view(rows.shape), parts, float(eps), ctas)
    return dx, x.new_zeros(1, channels, dtype=torch.float32) if parts is None else parts.sum(0, keepdim=True)
