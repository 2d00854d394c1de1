"""Merge the results of attention over disjoint sets of keys (branches)."""

from collections.abc import Sequence

import torch

from dsa.kernels.mla.limits import MAX_BRANCHES, MAX_MERGE_ROWS, MERGE_CHANNEL_MULTIPLE
from dsa.reference.mla import merge_attention as reference
from dsa.runtime.declare import (
    F32,
    FLOATS,
    ROWS,
    Arguments,
    Tensor,
    Tensors,
    at_most,
    dtype_name,
    multiple_of,
    op,
    rows_at_16_bytes,
    with_dims,
)

__all__ = ["merge_attention"]

MERGE_ATTENTION = Arguments(
    outs=Tensors("... H d_v", FLOATS, count="branches", layout=ROWS, merged=(0, -3)),
    lses=Tensors("... H", F32, count="branches", merged=(0, -2)),
    attn_sink=Tensor("H", F32, optional=True),
)


def merge_attention(
    outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], attn_sink: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """out = sum_i e^(lse_i - lse) out_i with lse = log sum_i e^lse_i: attention over the union of the branches' keys.

    outs       list or tuple of the branches' results [..., H, d_v] bf16, fp16 or fp32, all of one dtype, computed
               without a sink; or these results stacked in one tensor
    lses       the branches' LSE likewise, [..., H] fp32 (natural log); +inf or -inf marks an empty branch, whose out is
               ignored and may contain NaN
    attn_sink  [H] fp32 or None, any value from -inf to +inf: the merged out is scaled by e^lse / (e^lse + e^sink), once
               for all branches

    Returns out [..., H, d_v] in the branches' dtype and lse [..., H] fp32, without the sink, both contiguous. Where
    every branch is empty, out is 0 and lse +inf. Where all branches but one are empty and there is no sink, the result
    is exactly that branch. Intermediate results are fp32. Not differentiable.
    Raises TypeError or ValueError for other types, dtypes, shapes, strides and devices.
    On Hopper: one kernel, 1 to 4 branches, d_v a multiple of 8, outs with contiguous channels and rows at multiples of
    16 bytes; lses and attn_sink of any strides (if there are more than two dimensions before H, all of them but the
    last must be mergeable into one). Deterministic. CUDA-graph safe, no host synchronisation, no workspace.
    Source: DeepSeek-V4 (arXiv 2606.19348), one softmax over window and compressed keys.
    """
    return _merge_attention(_list_of(outs), _list_of(lses), attn_sink)


def _list_of(branches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return a tuple or a stacked tensor as a list. Anything else is returned unchanged, for the checks."""
    if isinstance(branches, torch.Tensor) and branches.layout is torch.strided and not branches.is_nested:
        return list(branches.unbind()) if branches.dim() else branches
    return list(branches) if isinstance(branches, tuple) else branches


def _results(outs: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    first = outs[0]
    out = torch.empty(first.shape, dtype=first.dtype, device=first.device)
    return out, torch.empty(first.shape[:-1], dtype=torch.float32, device=first.device)


@op(
    arguments=MERGE_ATTENTION,
    reference=reference.merge_attention,
    results=_results,
    limits={
        "branches": at_most(MAX_BRANCHES),
        "d_v": multiple_of(MERGE_CHANNEL_MULTIPLE, least=MERGE_CHANNEL_MULTIPLE),
        "rows*H": at_most(MAX_MERGE_ROWS),
    },
)
def _merge_attention(
    outs: list[torch.Tensor], lses: list[torch.Tensor], attn_sink: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    from dsa.kernels.mla.merge_attention_sm90 import compile_merge_attention

    out, lse = _results(outs)
    if out.numel():
        branches, logs = [with_dims(rows_at_16_bytes(x), 4) for x in outs], [with_dims(x, 3) for x in lses]
        launch = compile_merge_attention(dtype_name(out.dtype), len(branches), attn_sink is not None)
        launch(branches, logs, attn_sink, with_dims(out, 4), with_dims(lse, 3))
    return out, lse
