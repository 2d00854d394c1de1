"""Attention over a sliding window of latents, and the merge of attention branches with disjoint keys."""

from collections.abc import Sequence

import torch

from .checks import FLOATS, INT32, check_positive, check_tensor
from .softmax_attention import apply_sink, gather_attend


def sliding_window_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    window: int,
    softmax_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out[t] = softmax_j(softmax_scale * q[t] . kv[j]) kv[j, :d_v] over the keys max(0, p - window + 1) <= j <= p.

    p is the query's position among its sequence's keys: queries are the last of them, so that query i of Lq has
    p = Lk - Lq + i. A query with p < 0 sees no key.

    q              [total_q, H, d] fp32, bf16 or fp16, the sequences one after another
    kv             [total_k, 1, d] fp32, bf16 or fp16; a value is the first d_v numbers of its key
    cu_seqlens_q   [B + 1] int32: sequence b has the queries cu_seqlens_q[b] up to cu_seqlens_q[b + 1]
    cu_seqlens_k   [B + 1] int32, likewise for the keys
    window         keys that a query sees at most, itself included; at least 1
    softmax_scale  multiplies the logits
    d_v            at most d
    attn_sink      [H] fp32 or None, any value from -inf to +inf: out is scaled by e^lse / (e^lse + e^sink)

    Returns out [total_q, H, d_v] in q's dtype and lse [total_q, H] fp32 (natural log, without the sink). A query
    without keys, also one that belongs to no sequence, has out 0 and lse +inf. NaN in kv reaches only the queries whose
    window holds it. Everything is fp32 in between.
    Raises TypeError or ValueError for other types, dtypes and shapes, and for decreasing or too large cu_seqlens.
    Source: DeepSeek-V4 (arXiv 2606.19348), the window branch.
    """
    check_tensor("q", q, FLOATS, ("total_q", "H", "d"))
    total_q, heads, d = q.shape
    check_tensor("kv", kv, FLOATS, ("total_k", 1, d))
    check_positive("window", window)
    check_positive("d_v", d_v)
    if d_v > d:
        raise ValueError(f"d_v: must be at most d = {d}, got {d_v}")
    if attn_sink is not None:
        check_tensor("attn_sink", attn_sink, (torch.float32,), (heads,))
    q_starts = _boundaries("cu_seqlens_q", cu_seqlens_q, total_q)
    k_starts = _boundaries("cu_seqlens_k", cu_seqlens_k, kv.shape[0])
    if len(q_starts) != len(k_starts):
        raise ValueError(
            f"cu_seqlens_k: must have as many entries as cu_seqlens_q = {len(q_starts)}, got {len(k_starts)}"
        )

    out = torch.zeros(total_q, heads, d_v, device=q.device)
    lse = torch.full((total_q, heads), torch.inf, device=q.device)
    for q0, q1, k0, k1 in zip(q_starts, q_starts[1:], k_starts, k_starts[1:]):
        if q0 == q1:
            continue
        position = torch.arange(k1 - k0 - (q1 - q0), k1 - k0, device=q.device)
        width = min(window, k1 - k0)
        # Columns are the last `width` positions up to the query's own; those before the sequence come out negative.
        index = position[:, None] - width + 1 + torch.arange(width, device=q.device)
        out[q0:q1], lse[q0:q1], _ = gather_attend(q[q0:q1], kv[k0:k1, 0], index, softmax_scale, d_v)
    if attn_sink is not None:
        out = apply_sink(out, lse, attn_sink)
    return out.to(q.dtype), lse


def merge_attention(
    outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], attn_sink: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """out = sum_i e^(lse_i - lse) out_i with lse = log sum_i e^lse_i: attention over the union of disjoint key sets.

    outs       branches [..., H, d_v] fp32, bf16 or fp16, computed without a sink
    lses       their [..., H] fp32 (natural log); an infinity of either sign marks an empty branch, whose out is not
               looked at
    attn_sink  [H] fp32 or None: the merged out is scaled by e^lse / (e^lse + e^sink), once for all branches

    Returns out [..., H, d_v] in the first branch's dtype and lse [..., H] fp32, without the sink. Where every branch is
    empty: out 0 and lse +inf. Raises TypeError or ValueError for other types, dtypes and shapes.
    Source: DeepSeek-V4 (arXiv 2606.19348), one softmax over window and compressed keys.
    """
    if not outs or len(outs) != len(lses):
        raise ValueError(f"lses: must be one for each of at least one outs, got {len(outs)} outs and {len(lses)} lses")
    check_tensor("outs[0]", outs[0], FLOATS, tuple(outs[0].shape) if outs[0].dim() >= 2 else ("...", "H", "d_v"))
    for i, (out, lse) in enumerate(zip(outs, lses)):
        check_tensor(f"outs[{i}]", out, FLOATS, tuple(outs[0].shape))
        check_tensor(f"lses[{i}]", lse, (torch.float32,), tuple(outs[0].shape[:-1]))
    if attn_sink is not None:
        check_tensor("attn_sink", attn_sink, (torch.float32,), (outs[0].shape[-2],))
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


def _boundaries(name: str, cu_seqlens: torch.Tensor, total: int) -> list[int]:
    check_tensor(name, cu_seqlens, INT32, ("B + 1",))
    values = cu_seqlens.tolist()
    if not values or values != sorted(values) or values[0] < 0 or values[-1] > total:
        raise ValueError(f"{name}: must be non-decreasing numbers from 0 to {total}, got {values}")
    return values
