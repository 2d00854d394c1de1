"""Decoding over a sliding window of cached latents."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.mla.flash_mla_with_kvcache import sparse_mla_decode
from dsa.reference.mla.window_indices import window_slots


@without_autocast
def sliding_window_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor,
    window: int,
    softmax_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    is_fp8_kvcache: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out[b, i] = softmax_j(softmax_scale * q[b, i] . k_j) k_j[:d_v] over the keys max(0, p - window + 1) <= j <= p.

    p = cache_seqlens[b] - s_q + i, because the queries are the last of the cached tokens. A query with p < 0 sees no
    key.

    Intermediate results are fp32. A query without keys has out 0 and lse +inf. A page outside the table or the cache
    has no keys. NaN in a cached row reaches only the queries whose window contains it. Arguments as in
    `dsa.sliding_window_decode`, but a float cache may have another dtype than q's.
    Source: DeepSeek-V4 (arXiv 2606.19348), the window branch.
    """
    window = columns_of(window, block_table, cache)
    slots = window_slots(block_table, cache_seqlens, q.shape[1], cache.shape[1], window)
    return sparse_mla_decode(q, cache, slots, None, None, None, None, d_v, softmax_scale, attn_sink)


def columns_of(window: int, block_table: torch.Tensor | None, cache: torch.Tensor) -> int:
    """Return the window, but at most the keys that a row of block_table covers. So memory does not grow with the
    window."""
    return window if block_table is None else min(window, max(1, block_table.shape[1] * cache.shape[1]))
