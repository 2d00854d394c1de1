"""The weighted sum of what a mixture's experts computed for each token."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.checks import FLOATS, check_memory, check_same_device, check_same_dtype, check_tensor

INDICES = (torch.int32, torch.int64)


@without_autocast
def combine_experts(
    y: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None = None
) -> torch.Tensor:
    """out[t] = sum_j weights[t, j] * y[rows[t, j]] + shared[t], summed in fp32 and rounded once.

    y        [M, H] float, the experts' outputs in any order
    rows     [T, k] int32 or int64; a row outside [0, M) counts as zero, whatever its weight
    weights  [T, k] fp32
    shared   [T, H] of y's dtype, or None: zero

    Returns [T, H] in y's dtype. Products are rounded to fp32 and added in the order of j, shared last. Differentiable
    in y, weights and shared.
    Source: `MoE` of DeepSeek-V3.2's inference code.
    """
    check(y, rows, weights, shared)
    check_memory("y", y)
    present = (rows >= 0) & (rows < len(y))
    # The absent ones read a row of zeros behind the others.
    padded = torch.cat((y, y.new_zeros(1, y.shape[1])))
    sources = rows.long().masked_fill(~present, len(y))
    factors = weights.masked_fill(~present, 0.0)
    out = torch.zeros(len(rows), y.shape[1], dtype=torch.float32, device=y.device)
    for source, factor in zip(sources.unbind(1), factors.unbind(1)):
        out = out + padded[source].float() * factor[:, None]
    if shared is not None:
        out = out + shared.float()
    return out.to(y.dtype)


def check(y: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None) -> None:
    """Types, dtypes and shapes of `combine_experts`."""
    check_tensor("y", y, FLOATS, ("M", "H"))
    check_tensor("rows", rows, INDICES, ("T", "k"))
    check_tensor("weights", weights, (torch.float32,), tuple(rows.shape), "rows")
    if shared is not None:
        check_tensor("shared", shared, FLOATS, (len(rows), y.shape[1]), "rows and y")
        check_same_dtype(("y", y), shared=shared)
    check_same_device(("y", y), rows=rows, weights=weights, shared=shared)
