"""Root mean square norm of hidden states, latents and heads."""

import torch

from dsa.kernels.elementwise.limits import CHANNEL_MULTIPLE, MAX_NORM_CHANNELS, MAX_NORM_ROWS
from dsa.ops.elementwise._rms_norm_gradient import has_kernel
from dsa.reference.elementwise import rms_norm as reference
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
    wants_gradient,
    with_dims,
)

__all__ = ["rms_norm"]

CHANNELS = {"D": multiple_of(CHANNEL_MULTIPLE, least=CHANNEL_MULTIPLE)}

RMS_NORM = Arguments(
    x=Tensor("... D", FLOATS, layout=ROWS, merged=(0, -2)),
    weight=Tensor("D", F32, optional=True, layout=ROWS),
    eps=Number(least=0),
)


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float = 1e-6) -> torch.Tensor:
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension, in fp32, rounded once to x's dtype.

    x       [..., D] bf16, fp16 or fp32
    weight  [D] fp32, or None for ones
    eps     added to the mean of the squares: a finite number, at least 0

    Returns y, contiguous, in x's shape and dtype. A NaN makes its row NaN. A row's result does not depend on the other
    rows. Differentiable in x and weight. On Hopper a kernel computes the gradients for D up to 8192 (fp32: 4096) and
    for x laid out as below; these gradients cannot be differentiated again. Otherwise, and under torch.compile, the
    formula runs in PyTorch if gradients are asked for.
    Raises TypeError or ValueError for other types, dtypes, shapes, strides and devices.
    On Hopper: one kernel that reads x once and writes y once. D a multiple of 8 up to 32768 (fp32: 16384); contiguous
    channels; rows at any multiples of 16 bytes; if there are more than two dimensions before D, all of them but the
    last must be mergeable into one. Deterministic. The kernel and the reference sum in different orders, so a few
    values round to an adjacent representable number. CUDA-graph safe, no host synchronisation.
    Source: arXiv 1910.07467; `RMSNorm` of DeepSeek-V3.2's inference code, and V4's norm of each query head.
    """
    if torch.is_grad_enabled() and wants_gradient(x, weight):
        RMS_NORM.check(x, weight, eps)
        if has_kernel(x):
            return torch.ops.dsa.rms_norm(x, weight, eps)  # the registered op has the kernel's backward pass
    return _rms_norm(x, weight, eps)


def _results(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@op(
    arguments=RMS_NORM,
    reference=reference.rms_norm,
    results=_results,
    limits={"rows": at_most(MAX_NORM_ROWS), **CHANNELS, "D*itemsize": at_most(2 * MAX_NORM_CHANNELS["bfloat16"])},
    differentiable=True,
)
def _rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    from dsa.kernels.elementwise.rms_norm_sm90 import choose_config, compile_rms_norm

    out = _results(x)
    if out.numel():
        rows, name = with_dims(rows_at_16_bytes(x), 3), dtype_name(x.dtype)
        launch = compile_rms_norm(name, weight is not None, choose_config(name, x.shape[-1]))
        launch(rows, weight, out if out.dim() == 3 else out.view(rows.shape), float(eps))
    return out


def _save(ctx, inputs: tuple, output: torch.Tensor) -> None:
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def _gradients(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    dx, dw = torch.ops.dsa.rms_norm_gradient(grad, x, weight, ctx.eps)
    return dx, None if weight is None else dw[0], None


torch.library.register_autograd("dsa::rms_norm", _gradients, setup_context=_save)
