"""Attention over a sliding window of latents, with or without selected keys."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.mla.softmax_attention import apply_sink, gather_attend
from dsa.reference.mla.window_indices import window_indices


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

    p is the query's position, and j a key's position, among the keys of the query's sequence. A sequence's queries are
    its last tokens: query i of Lq has p = Lk - Lq + i. A query with p < 0 sees no key.

    Intermediate results are fp32. A query without keys, including one that belongs to no sequence, has out 0 and lse
    +inf. NaN in kv reaches only the queries whose window contains it. Raises ValueError for cu_seqlens that decrease,
    are negative or exceed the number of rows. Arguments as in `dsa.sliding_window_attention`, but kv may have another
    float dtype than q's.
    Source: DeepSeek-V4 (arXiv 2606.19348), the window branch.
    """
    packed = (q, kv, cu_seqlens_q, cu_seqlens_k, window)
    index = _window(*packed, indices)
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

    The window's keys are the rows of kv that `sliding_window_attention` attends to; the selected entries are the rows
    indices[t] of compressed. There is one softmax over all of them, and one sink.

    Intermediate results are fp32. A query without keys has out 0 and lse +inf, and NaN reaches only the queries that
    attend to it. Raises ValueError like `sliding_window_attention`. Arguments as in `dsa.window_sparse_attention`, but
    kv and compressed may have other float dtypes than q's.
    Source: DeepSeek-V4 (arXiv 2606.19348), one softmax over window and compressed keys.
    """
    packed = (q, kv, cu_seqlens_q, cu_seqlens_k, window)
    near = _window(*packed, window_indices)
    counts = indices.shape[1] if topk_length is None else topk_length[:, None]
    selected = (indices >= 0) & (indices < compressed.shape[0])
    selected &= torch.arange(indices.shape[1], device=q.device) < counts
    # `keys` is kv and then compressed. Wrong window_indices must not name a row of compressed.
    near = torch.where(near < kv.shape[0], near, -1)
    index = torch.cat((near.long(), torch.where(selected, indices.long() + kv.shape[0], -1)), dim=1)
    keys = torch.cat((kv.float(), compressed.float())).squeeze(1)
    out, lse, _ = gather_attend(q, keys, index, softmax_scale, d_v)
    if attn_sink is not None:
        out = apply_sink(out, lse, attn_sink)
    return out.to(q.dtype), lse


def _window(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    window: int,
    indices: torch.Tensor | None,
) -> torch.Tensor:
    """Check the boundaries, and return `indices`, by default `window_indices` for a window of at most kv's rows. So
    memory does not grow with the window."""
    for name, cu_seqlens, rows, x in (("cu_seqlens_q", cu_seqlens_q, "q", q), ("cu_seqlens_k", cu_seqlens_k, "kv", kv)):
        values, total = cu_seqlens.tolist(), x.shape[0]
        if values != sorted(values) or values[0] < 0 or values[-1] > total:
            raise ValueError(
                f"{name}: must be non-decreasing numbers from 0 to {total}, got {values} (sizes as of {rows})"
            )
    if indices is not None:
        return indices
    return window_indices(cu_seqlens_q, cu_seqlens_k, q.shape[0], max(1, min(window, kv.shape[0])))
