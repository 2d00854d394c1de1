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

    p = cache_seqlens[b] - s_q + i, for the queries belong to the last of the cached keys. A query with p < 0 sees no
    key.

    Everything is fp32 in between. A query without keys has out 0 and lse +inf, a page outside the table or the cache
    holds no keys, and NaN in a cached row reaches only the queries whose window holds it. Arguments as of
    `dsa.sliding_window_decode`; keys of fp32 queries may have any float dtype.
    Source: DeepSeek-V4 (arXiv 2606.19348), the window branch.
    """
    window = columns_of(window, block_table, cache)
    slots = window_slots(block_table, cache_seqlens, q.shape[1], cache.shape[1], window)
    return sparse_mla_decode(q, cache, slots, None, None, None, None, d_v, softmax_scale, attn_sink)


def columns_of(window: int, block_table: torch.Tensor | None, cache: torch.Tensor) -> int:
    """The window, at most the keys of a row of block_table, so that huge windows need little memory."""
    return window if block_table is None else min(window, max(1, block_table.shape[1] * cache.shape[1]))
