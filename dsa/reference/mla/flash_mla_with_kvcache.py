"""MLA decoding over a paged latent cache: dense, or over the keys that an indexer selected."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.cache.kv_cache import read_kv_cache
from dsa.reference.mla.mla_metadata import FlashMLASchedMeta
from dsa.reference.mla.softmax_attention import apply_sink, attend, queries_at_a_time


@without_autocast
def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta | torch.Tensor | None,
    num_splits: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    enable_batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out = softmax_j(softmax_scale * q . k_j) k_j[:head_dim_v] over the keys j of each query.

    Without `indices` these are the keys of the query's sequence (dense), with `indices` the selected keys of both
    caches (sparse). Intermediate results are fp32, and the scales of a byte cache are used at full precision. The
    result does not depend on the plan, and no sequence's result depends on another sequence. A query without keys has
    out 0 and lse +inf, and NaN in a cached row reaches only the queries that see or select it. Arguments as in
    `dsa.flash_mla_with_kvcache`, but the reference has no `out`, and accepts float caches of another dtype than q's.
    Source: FlashMLA's function of this name, which supports fewer caches, head counts and combinations.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    if indices is None:
        return dense_mla_decode(q, k_cache, block_table, cache_seqlens, head_dim_v, scale, causal)
    extra = (extra_k_cache, extra_indices_in_kvcache, extra_topk_length)
    return sparse_mla_decode(q, k_cache, indices, topk_length, *extra, head_dim_v, scale, attn_sink)


@without_autocast
def dense_mla_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    head_dim_v: int,
    softmax_scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out [B, s_q, h_q, head_dim_v] and lse [B, h_q, s_q]."""
    batch, s_q, h_q, _ = q.shape
    pages, page_size, h_k, _ = k_cache.shape
    group = h_q // h_k
    out = torch.zeros(batch, s_q, h_q, head_dim_v, dtype=torch.float32, device=q.device)
    lse = torch.full((batch, h_q, s_q), torch.inf, dtype=torch.float32, device=q.device)
    for b in range(batch):
        length = min(max(int(cache_seqlens[b]), 0), block_table.shape[1] * page_size)
        position = torch.arange(length, device=q.device)
        page = block_table[b, position // page_size].long()
        slots = torch.where((page >= 0) & (page < pages), page * page_size + position % page_size, -1)
        for head in range(h_k):
            heads = slice(head * group, (head + 1) * group)
            kv = read_kv_cache(k_cache[:, :, head : head + 1], slots)
            for i in range(s_q):
                # Slice the keys instead of masking them, because 0 * NaN is NaN.
                seen = max(0, int(cache_seqlens[b]) - s_q + i + 1) if causal else length
                keys = kv[None, :seen], slots[None, :seen] >= 0
                row, row_lse, _ = attend(q[b, None, i, heads], *keys, softmax_scale, head_dim_v)
                out[b, i, heads], lse[b, heads, i] = row[0], row_lse[0]
    return out.to(q.dtype), lse


@without_autocast
def sparse_mla_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    topk_length: torch.Tensor | None,
    extra_k_cache: torch.Tensor | None,
    extra_indices_in_kvcache: torch.Tensor | None,
    extra_topk_length: torch.Tensor | None,
    head_dim_v: int,
    softmax_scale: float,
    attn_sink: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out [B, s_q, h_q, head_dim_v] and lse [B, h_q, s_q], a view of a tensor [B, s_q, h_q]."""
    given = (k_cache, indices, topk_length), (extra_k_cache, extra_indices_in_kvcache, extra_topk_length)
    selections = [(cache, _slots(cache, *rest)) for cache, *rest in given if cache is not None]
    out, lse = _sparse(q.flatten(0, 1), selections, head_dim_v, softmax_scale)
    if attn_sink is not None:
        out = apply_sink(out, lse, attn_sink)
    out, lse = out.unflatten(0, q.shape[:2]), lse.unflatten(0, q.shape[:2])
    return out.to(q.dtype), lse.transpose(1, 2)


def _sparse(
    q: torch.Tensor, selections: list[tuple[torch.Tensor, torch.Tensor]], d_v: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention of q [R, h_q, d] to the keys of all pairs (cache, slots [R, K]), with one softmax. K can differ
    between pairs. Slot -1 names no key.

    Return out [R, h_q, d_v] and lse [R, h_q].
    """
    rows, h_q, d = q.shape
    out = torch.empty(rows, h_q, d_v, dtype=torch.float32, device=q.device)
    lse = torch.empty(rows, h_q, dtype=torch.float32, device=q.device)
    chunk = queries_at_a_time(sum(slots.shape[1] for _, slots in selections), d, q.device)
    for first in range(0, rows, chunk):
        part = slice(first, first + chunk)
        kv = torch.cat([read_kv_cache(cache, slots[part]) for cache, slots in selections], dim=1)
        valid = torch.cat([slots[part] >= 0 for _, slots in selections], dim=1)
        out[part], lse[part], _ = attend(q[part], kv, valid, scale, d_v)
    return out, lse


def _slots(cache: torch.Tensor, indices: torch.Tensor, topk_length: torch.Tensor | None) -> torch.Tensor:
    """Return the indices as slots [B * s_q, K]. Indices outside the cache or after topk_length become -1."""
    valid = (indices >= 0) & (indices < cache.shape[0] * cache.shape[1])
    if topk_length is not None:
        valid &= torch.arange(indices.shape[2], device=indices.device) < topk_length[:, None, None]
    return torch.where(valid, indices, -1).flatten(0, 1)
