"""Attention over a sliding window of latents, alone or joined with selected keys, and the merge of attention branches
with disjoint keys."""

from collections.abc import Sequence

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.checks import (
    FLOATS,
    INT32,
    check_memory,
    check_number,
    check_positive,
    check_same_device,
    check_same_dtype,
    check_tensor,
    shape_of,
)
from dsa.reference.mla.softmax_attention import apply_sink, check_keys_dtype, check_value_dim, gather_attend
from dsa.reference.mla.window_indices import check_boundaries, window_indices


@without_autocast
def sliding_window_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    window: int,
    softmax_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    *,
    indices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out[t] = softmax_j(softmax_scale * q[t] . kv[j]) kv[j, :d_v] over the keys max(0, p - window + 1) <= j <= p.

    p is the query's position among its sequence's keys: queries are the last of them, so that query i of Lq has
    p = Lk - Lq + i. A query with p < 0 sees no key.

    q              [total_q, H, d] fp32, bf16 or fp16, one sequence after the other; if fp32, keys may be any of these
    kv             [total_k, 1, d] in q's dtype; a value is the first d_v numbers of its key
    cu_seqlens_q   [B + 1] int32: sequence b has the queries cu_seqlens_q[b] up to cu_seqlens_q[b + 1]
    cu_seqlens_k   [B + 1] int32, likewise for the keys
    window         keys that a query sees at most, itself included; at least 1
    softmax_scale  multiplies the logits: a finite number
    d_v            at most d
    attn_sink      [H] fp32 or None, any value from -inf to +inf: out is scaled by e^lse / (e^lse + e^sink)
    indices        [total_q, window] int32 or None: what `window_indices` gives, if the caller has it

    Returns out [total_q, H, d_v] in q's dtype and lse [total_q, H] fp32 (natural log, without the sink). A query
    without keys, also one that belongs to no sequence, has out 0 and lse +inf. NaN in kv reaches only the queries whose
    window holds it. Everything is fp32 in between.
    Raises TypeError or ValueError for other types, dtypes and shapes, and for decreasing or too large cu_seqlens.
    Source: DeepSeek-V4 (arXiv 2606.19348), the window branch.
    """
    check_window_attention(q, kv, cu_seqlens_q, cu_seqlens_k, window, softmax_scale, d_v, attn_sink, indices)
    check_memory("q", q)
    index = _window(q, kv, cu_seqlens_q, cu_seqlens_k, window, indices)
    out, lse, _ = gather_attend(q, kv.squeeze(1), index, softmax_scale, d_v)
    if attn_sink is not None:
        out = apply_sink(out, lse, attn_sink)
    return out.to(q.dtype), lse


@without_autocast
def window_sparse_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    window: int,
    compressed: torch.Tensor,
    indices: torch.Tensor,
    softmax_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    *,
    window_indices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out[t] = softmax_j(softmax_scale * q[t] . k_j) k_j[:d_v] over the keys of t's window and its selected entries.

    The window's keys are those rows of kv that `sliding_window_attention` attends to, the others the rows indices[t] of
    compressed. One softmax over all of them, and one sink.

    q             [total_q, H, d] fp32, bf16 or fp16, one sequence after the other; if fp32, keys may be any of these
    kv            [total_k, 1, d] in q's dtype; a value is the first d_v numbers of its key
    cu_seqlens_q, cu_seqlens_k  [B + 1] int32, where the sequences begin in q and in kv
    window        keys of kv that a query sees at most, itself included; at least 1
    compressed    [n, 1, d] in q's dtype, keys of any origin; a value is the first d_v numbers of its key
    indices       [total_q, K] int32, rows of compressed; negative or at least n is no key. A key named twice counts
                  twice
    softmax_scale multiplies the logits: a finite number
    d_v           at most d
    attn_sink     [H] fp32 or None, any value from -inf to +inf: out is scaled by e^lse / (e^lse + e^sink)
    topk_length   [total_q] int32 or None: only the first topk_length[t] of indices[t] count
    window_indices  [total_q, window] int32 or None: what the function of this name gives, if the caller has it

    Returns out [total_q, H, d_v] in q's dtype and lse [total_q, H] fp32 (natural log, without the sink). A query
    without keys has out 0 and lse +inf. NaN reaches only the queries that attend to it. Everything is fp32 in between.
    Raises TypeError or ValueError for other types, dtypes and shapes, and for decreasing or too large cu_seqlens.
    Source: DeepSeek-V4 (arXiv 2606.19348), one softmax over window and compressed keys.
    """
    packed = (q, kv, cu_seqlens_q, cu_seqlens_k, window)
    check_window_attention(*packed, softmax_scale, d_v, attn_sink, window_indices, "window_indices")
    check_selected(q, compressed, indices, topk_length)
    check_memory("q", q)
    near = _window(*packed, window_indices)
    counts = indices.shape[1] if topk_length is None else topk_length[:, None]
    selected = (indices >= 0) & (indices < compressed.shape[0])
    selected &= torch.arange(indices.shape[1], device=q.device) < counts
    # All keys in one array, the window's first: what names none of these must not name one of the others.
    near = torch.where(near < kv.shape[0], near, -1)
    index = torch.cat((near.long(), torch.where(selected, indices.long() + kv.shape[0], -1)), dim=1)
    keys = torch.cat((kv.float(), compressed.float())).squeeze(1)
    out, lse, _ = gather_attend(q, keys, index, softmax_scale, d_v)
    if attn_sink is not None:
        out = apply_sink(out, lse, attn_sink)
    return out.to(q.dtype), lse


@without_autocast
def merge_attention(
    outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], attn_sink: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """out = sum_i e^(lse_i - lse) out_i with lse = log sum_i e^lse_i: attention over the union of disjoint key sets.

    outs       branches [..., H, d_v] fp32, bf16 or fp16, all of one dtype, computed without a sink
    lses       their [..., H] fp32 (natural log); an infinity of either sign marks an empty branch, whose out is not
               looked at
    attn_sink  [H] fp32 or None: the merged out is scaled by e^lse / (e^lse + e^sink), once for all branches

    Returns out [..., H, d_v] in the first branch's dtype and lse [..., H] fp32, without the sink. Where every branch is
    empty: out 0 and lse +inf. Raises TypeError or ValueError for other types, dtypes and shapes.
    Source: DeepSeek-V4 (arXiv 2606.19348), one softmax over window and compressed keys.
    """
    check_branches(outs, lses, attn_sink)
    check_memory("outs[0]", outs[0])
    branches = torch.stack(list(lses))
    empty = branches.isinf()
    branches = branches.masked_fill(empty, -torch.inf)
    lse = branches.logsumexp(0)
    nothing = empty.all(0)
    weights = (branches - lse.masked_fill(nothing, 0.0)).exp()
    values = torch.stack([out.float() for out in outs]).masked_fill(empty.unsqueeze(-1), 0.0)
    merged, lse = (weights.unsqueeze(-1) * values).sum(0), lse.masked_fill(nothing, torch.inf)
    if attn_sink is not None:
        merged = apply_sink(merged, lse, attn_sink)
    return merged.to(outs[0].dtype), lse


def check_branches(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], attn_sink: torch.Tensor | None) -> None:
    """What `merge_attention` asks of its arguments."""
    for name, branches in (("outs", outs), ("lses", lses)):
        if not isinstance(branches, (list, tuple, torch.Tensor)) or (
            isinstance(branches, torch.Tensor) and branches.dim() == 0
        ):
            raise TypeError(f"{name}: must be a list of tensors, got {type(branches).__name__}")
    if len(outs) == 0 or len(outs) != len(lses):
        raise ValueError(f"lses: must be one for each of at least one outs, got {len(outs)} outs and {len(lses)} lses")
    known = len(shape_of(outs[0])) >= 2
    check_tensor("outs[0]", outs[0], FLOATS, tuple(outs[0].shape) if known else ("...", "H", "d_v"))
    for i, (out, lse) in enumerate(zip(outs, lses)):
        check_tensor(f"outs[{i}]", out, FLOATS, tuple(outs[0].shape), "outs[0]")
        check_tensor(f"lses[{i}]", lse, (torch.float32,), tuple(outs[0].shape[:-1]), "outs[0]")
        check_same_dtype(("outs[0]", outs[0]), **{f"outs[{i}]": out})
        check_same_device(("outs[0]", outs[0]), **{f"outs[{i}]": out, f"lses[{i}]": lse})
    if attn_sink is not None:
        check_tensor("attn_sink", attn_sink, (torch.float32,), (outs[0].shape[-2],), "outs[0]")
        check_same_device(("outs[0]", outs[0]), attn_sink=attn_sink)


def check_window_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    window: int,
    softmax_scale: float,
    d_v: int,
    attn_sink: torch.Tensor | None,
    indices: torch.Tensor | None,
    name: str = "indices",
) -> None:
    """What attention to windows of packed keys asks of its arguments, but for what cu_seqlens hold."""
    check_tensor("q", q, FLOATS, ("total_q", "H", "d"))
    check_tensor("kv", kv, FLOATS, ("total_k", 1, q.shape[2]), "q")
    check_boundaries(cu_seqlens_q, cu_seqlens_k)
    check_positive("window", window)
    check_softmax(softmax_scale, d_v, attn_sink, q)
    if indices is not None:
        check_tensor(name, indices, INT32, (q.shape[0], window), "q and window")
    check_keys_dtype(q, kv=kv)
    check_same_device(("q", q), kv=kv, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **{name: indices})


def check_selected(
    q: torch.Tensor, compressed: torch.Tensor, indices: torch.Tensor, topk_length: torch.Tensor | None
) -> None:
    """What `window_sparse_attention` asks of its selected keys."""
    check_tensor("compressed", compressed, FLOATS, ("n", 1, q.shape[2]), "q")
    check_tensor("indices", indices, INT32, (q.shape[0], "K"), "q")
    if topk_length is not None:
        check_tensor("topk_length", topk_length, INT32, (q.shape[0],), "q")
    check_keys_dtype(q, compressed=compressed)
    check_same_device(("q", q), compressed=compressed, indices=indices, topk_length=topk_length)


def check_softmax(softmax_scale: float, d_v: int, attn_sink: torch.Tensor | None, q: torch.Tensor) -> None:
    """What attention to windows asks of these, for queries q [..., H, d]."""
    check_number("softmax_scale", softmax_scale)
    check_value_dim("d_v", d_v, q.shape[-1])
    if attn_sink is not None:
        check_tensor("attn_sink", attn_sink, (torch.float32,), (q.shape[-2],), "q")
        check_same_device(("q", q), attn_sink=attn_sink)


def _window(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    window: int,
    indices: torch.Tensor | None,
) -> torch.Tensor:
    """The window's keys of each query; no more columns than there are keys."""
    for name, cu_seqlens, rows, x in (("cu_seqlens_q", cu_seqlens_q, "q", q), ("cu_seqlens_k", cu_seqlens_k, "kv", kv)):
        values, total = cu_seqlens.tolist(), x.shape[0]
        if values != sorted(values) or values[0] < 0 or values[-1] > total:
            raise ValueError(
                f"{name}: must be non-decreasing numbers from 0 to {total}, got {values} (sizes as of {rows})"
            )
    if indices is not None:
        return indices
    return window_indices(cu_seqlens_q, cu_seqlens_k, q.shape[0], max(1, min(window, kv.shape[0])))
