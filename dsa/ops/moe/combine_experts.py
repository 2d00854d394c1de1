"""The weighted sum of the experts' outputs for each token in a mixture of experts."""

import torch

from dsa.kernels.moe.limits import CHANNEL_MULTIPLE, COMBINE_CTA_BYTES, MAX_COMBINE_ROWS
from dsa.reference.moe import combine_experts as reference
from dsa.runtime.declare import (
    F32,
    FLOATS,
    ROWS,
    Arguments,
    Tensor,
    at_most,
    dtype_name,
    multiple_of,
    op,
    rows_at_16_bytes,
)

__all__ = ["combine_experts"]

COMBINE_EXPERTS = Arguments(
    y=Tensor("M H", FLOATS, layout=ROWS),
    rows=Tensor("T k", (torch.int32, torch.int64)),
    weights=Tensor("T k", F32, optional=True),
    shared=Tensor("T H", FLOATS, like="y", optional=True, layout=ROWS),
    residual=Tensor("T H", FLOATS, like="y", optional=True, layout=ROWS),
)


def combine_experts(
    y: torch.Tensor,
    rows: torch.Tensor,
    weights: torch.Tensor | None = None,
    shared: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[t] = sum_j weights[t, j] * y[rows[t, j]] + shared[t], summed in fp32 and rounded once. With residual:
    residual[t] + out[t].

    y        [M, H] bf16, fp16 or fp32: the experts' outputs, sorted by expert or in any other order. A row that is not
             in `rows` may contain anything, even NaN; its gradient is zero
    rows     [T, k] int32 or int64, any k: rows[t] are the rows of y with the outputs for token t. A row outside [0, M)
             is not read and counts as zero, even if its weight is NaN or infinite
    weights  [T, k] fp32, or None: weights of 1, for rows that are multiplied by their weights already
    shared   [T, H] of y's dtype, the shared expert's output, or None: zero
    residual [T, H] of y's dtype, or None: the rounded sum is added to this stream, and the result is rounded again

    Returns [T, H] in y's dtype, contiguous. Products are rounded to fp32 and added in the order of j, shared last, so
    that the results of all runs, of the kernel and of the reference agree bit for bit. NaN and infinity follow IEEE
    rules. If M or k is 0, the sum is the tensor `shared`, or zero if that is None. Differentiable in all arguments but
    rows: if a gradient is asked for, the formula runs in PyTorch.
    Raises TypeError or ValueError for other types, dtypes, shapes, strides and devices.
    On Hopper: one kernel, H a multiple of 8; y, shared and residual with contiguous channels and rows at multiples of
    16 bytes, rows and weights of any strides; at most 2^31 - 1 rows of y, and at most 2^31 - 1 CTAs, where a CTA
    computes 2 KiB of a token's row of the result.
    Deterministic. CUDA-graph safe, no host synchronisation, no workspace.
    Source: `MoE` of DeepSeek-V3.2's inference code.
    """
    return _combine_experts(y, rows, weights, shared, residual)


def _results(y: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return torch.empty((len(rows), y.shape[1]), dtype=y.dtype, device=y.device)


def _check_ctas(y: torch.Tensor, rows: torch.Tensor) -> None:
    ctas = len(rows) * -(-y.shape[1] * y.element_size() // COMBINE_CTA_BYTES)
    if ctas > MAX_COMBINE_ROWS:
        raise ValueError(
            f"rows: the kernel takes at most {MAX_COMBINE_ROWS} times {COMBINE_CTA_BYTES} bytes of tokens' "
            f"channels, got {ctas}"
        )


@op(
    arguments=COMBINE_EXPERTS,
    reference=reference.combine_experts,
    results=_results,
    limits={"H": multiple_of(CHANNEL_MULTIPLE), "M": at_most(MAX_COMBINE_ROWS)},
    rule=_check_ctas,
    differentiable=True,
)
def _combine_experts(
    y: torch.Tensor,
    rows: torch.Tensor,
    weights: torch.Tensor | None,
    shared: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    from dsa.kernels.moe.combine_experts_sm90 import compile_combine_experts

    # The kernel does not accept empty tensors, and PyTorch needs one or two kernels for them.
    if y.numel() == 0 or rows.numel() == 0:
        return reference.combine_experts(y, rows, weights, shared, residual)
    out = _results(y, rows)
    given = (x is not None for x in (weights, shared, residual))
    launch = compile_combine_experts(dtype_name(y.dtype), dtype_name(rows.dtype), *given)
    added = (None if x is None else rows_at_16_bytes(x) for x in (shared, residual))
    launch(rows_at_16_bytes(y), rows, weights, *added, out)
    return out
