"""The weighted sum of what a mixture's experts computed for each token."""

import functools
from collections.abc import Callable

import torch

from dsa import backends
from dsa.ops._aligned import rows_at_16_bytes
from dsa.ops._kernel_arguments import dtype_name
from dsa.reference.moe import combine_experts as reference

CHANNEL_MULTIPLE = 8
CTA_BYTES = 2048  # of a token's channels
MOST = 2**31 - 1


def combine_experts(
    y: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None = None
) -> torch.Tensor:
    """out[t] = sum_j weights[t, j] * y[rows[t, j]] + shared[t], summed in fp32 and rounded once.

    y        [M, H] bf16, fp16 or fp32: the experts' outputs, sorted by expert or in any other order
    rows     [T, k] int32 or int64, any k: where the outputs for token t lie. A row outside [0, M) is not read and
             counts as zero, whatever its weight
    weights  [T, k] fp32
    shared   [T, H] of y's dtype, the shared expert's output, or None: zero

    Returns [T, H] in y's dtype, contiguous. Products are rounded to fp32 and added in the order of j, shared last, so
    runs and backends agree bit for bit. NaN and infinity follow IEEE rules. No rows (M or k of 0): shared, or zeros.
    Differentiable in y, weights and shared: where a gradient is asked for, PyTorch computes the formula.
    Raises TypeError or ValueError for other types, dtypes, shapes, strides and devices.
    On Hopper: one kernel, H a multiple of 8; y and shared with contiguous channels and rows at multiples of 16 bytes,
    rows and weights of any strides; at most 2^31 - 1 rows of y and of CTAs, which have 2 KiB of a token each.
    Deterministic. CUDA-graph safe, no host synchronisation, no workspace.
    Source: `MoE` of DeepSeek-V3.2's inference code.
    """
    floats = [x for x in (y, weights, shared) if isinstance(x, torch.Tensor)]
    if torch.is_grad_enabled() and any(x.requires_grad for x in floats):
        return reference.combine_experts(y, rows, weights, shared)
    if torch.compiler.is_compiling():
        return torch.ops.dsa.combine_experts(y, rows, weights, shared)
    return _combine(y, rows, weights, shared)


def _combine(y: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None) -> torch.Tensor:
    reference.check(y, rows, weights, shared)
    # Nothing to sum: PyTorch's one or two kernels, and no tensor without memory goes to ours.
    if not backends.runs_kernel("combine_experts", y) or y.numel() == 0 or rows.numel() == 0:
        return reference.combine_experts(y, rows, weights, shared)
    _check_kernel_takes(y, rows)
    out = _allocate(y, rows)
    launch = _kernel(y.dtype, rows.dtype, shared is not None)
    with backends.on_device(y):
        launch(_aligned("y", y), rows, weights, None if shared is None else _aligned("shared", shared), out)
    return out


def _check_kernel_takes(y: torch.Tensor, rows: torch.Tensor) -> None:
    if y.shape[1] % CHANNEL_MULTIPLE:
        raise ValueError(f"y: the Hopper kernel takes H a multiple of {CHANNEL_MULTIPLE}, got shape {list(y.shape)}")
    if len(y) > MOST:
        raise ValueError(f"y: the Hopper kernel takes at most {MOST} rows, got shape {list(y.shape)}")
    ctas = len(rows) * -(-y.shape[1] * y.element_size() // CTA_BYTES)
    if ctas > MOST:
        raise ValueError(
            f"rows: the Hopper kernel takes at most {MOST} times {CTA_BYTES} bytes of tokens' channels, got {ctas}"
        )


def _aligned(name: str, x: torch.Tensor) -> torch.Tensor:
    aligned = rows_at_16_bytes(x)
    if aligned is None:
        raise ValueError(
            f"{name}: channels must be contiguous and rows start at multiples of 16 bytes, got strides "
            f"{list(x.stride())} and an address {x.data_ptr() % 16} bytes past one"
        )
    return aligned


@functools.cache
def _kernel(dtype: torch.dtype, index_dtype: torch.dtype, shared: bool) -> Callable[..., None]:
    from dsa.kernels.moe.combine_experts_sm90 import compile_combine_experts

    return compile_combine_experts(dtype_name(dtype), dtype_name(index_dtype), shared)


def _allocate(y: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return torch.empty((len(rows), y.shape[1]), dtype=y.dtype, device=y.device)


torch.library.custom_op("dsa::combine_experts", mutates_args=())(_combine)


@torch.library.register_fake("dsa::combine_experts")
def _(y: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None) -> torch.Tensor:
    reference.check(y, rows, weights, shared)
    return _allocate(y, rows)
