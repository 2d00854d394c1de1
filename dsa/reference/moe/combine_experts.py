"""The weighted sum of the experts' outputs for each token."""

import torch

from dsa.reference.autocast import without_autocast


@without_autocast
def combine_experts(
    y: torch.Tensor,
    rows: torch.Tensor,
    weights: torch.Tensor | None = None,
    shared: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[t] = sum_j weights[t, j] * y[rows[t, j]] + shared[t], summed in fp32 and rounded once. With residual:
    residual + out, rounded again.

    Without weights, all weights are 1. Rows outside y count as zero. Rows of y that `rows` does not name do not affect
    the result, even if they are NaN. Products are rounded to fp32 and added in the order of j, shared last.
    Differentiable in everything except rows. Arguments as in `dsa.combine_experts`.
    Source: `MoE` of DeepSeek-V3.2's inference code.
    """
    valid = (rows >= 0) & (rows < len(y))
    padded = torch.cat((y, y.new_zeros(1, y.shape[1])))
    sources = rows.long().masked_fill(~valid, len(y))
    factors = torch.ones_like(sources, dtype=torch.float32) if weights is None else weights.masked_fill(~valid, 0.0)
    out = torch.zeros(len(rows), y.shape[1], dtype=torch.float32, device=y.device)
    for source, factor in zip(sources.unbind(1), factors.unbind(1)):
        out = out + padded[source].float() * factor[:, None]
    if shared is not None:
        out = out + shared.float()
    out = out.to(y.dtype)
    return out if residual is None else (residual + out).contiguous()
