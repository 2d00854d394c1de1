"""Decoding over a sliding window of cached latents."""

import torch

from dsa.ops.cache._specs import page_layout
from dsa.reference.autocast import without_autocast
from dsa.reference.mla.flash_mla_with_kvcache import (
    check_latent_cache,
    check_layout_flag,
    latent_cache,
    sparse_mla_decode,
)
from dsa.reference.mla.window_indices import window_slots
from dsa.runtime.arguments import F32, Arguments, Flag, Int, Number, Tensor
from dsa.runtime.checks import FLOATS, INT32, MOST_SLOTS, check_memory


def _check_cache(
    q: torch.Tensor, cache: torch.Tensor, block_table: torch.Tensor | None, window: int, is_fp8_kvcache: bool
) -> None:
    check_layout_flag("cache", cache, is_fp8_kvcache)
    check_latent_cache("cache", cache, q)
    batch, s_q, *_ = q.shape
    if cache.shape[0] * cache.shape[1] > MOST_SLOTS:
        raise ValueError(f"cache: must have at most 2^31 slots, got {cache.shape[0]} pages of {cache.shape[1]}")
    if block_table is None and (cache.shape[0] < batch or cache.shape[1] < window + s_q - 1):
        raise ValueError(
            f"cache: must have a page of at least window + s_q - 1 = {window + s_q - 1} keys for each of {batch} "
            f"sequences without a block_table, got {cache.shape[0]} pages of {cache.shape[1]} (sizes as of q)"
        )


SLIDING_WINDOW_DECODE = Arguments(
    rule=_check_cache,
    q=Tensor("B s_q H d", FLOATS),
    cache=latent_cache("pages P 1 row", layout=page_layout),
    block_table=Tensor("B max_pages", INT32, optional=True),
    cache_seqlens=Tensor("B", INT32),
    window=Int(),
    softmax_scale=Number(),
    d_v=Int(most="d"),
    attn_sink=Tensor("H", F32, optional=True),
    is_fp8_kvcache=Flag(),
)


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
    options = (window, softmax_scale, d_v, attn_sink, is_fp8_kvcache)
    SLIDING_WINDOW_DECODE.check(q, cache, block_table, cache_seqlens, *options)
    check_memory("q", q)
    window = columns_of(window, block_table, cache)
    slots = window_slots(block_table, cache_seqlens, q.shape[1], cache.shape[1], window)
    return sparse_mla_decode(q, cache, slots, None, None, None, None, d_v, softmax_scale, attn_sink)


def columns_of(window: int, block_table: torch.Tensor | None, cache: torch.Tensor) -> int:
    """The window, or the keys that fit a sequence's row of block_table: memory is asked for no more."""
    return window if block_table is None else min(window, max(1, block_table.shape[1] * cache.shape[1]))
