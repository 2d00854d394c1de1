"""Decoding over a sliding window of cached latents."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.cache.kv_cache import BYTE_DTYPES, cache_dim
from dsa.reference.checks import (
    FLOATS,
    INT32,
    check_flag,
    check_memory,
    check_positive,
    check_same_device,
    check_tensor,
)
from dsa.reference.mla.flash_mla_with_kvcache import decode_sparse
from dsa.reference.mla.sliding_window_attention import check_softmax
from dsa.reference.mla.softmax_attention import check_keys_dtype
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

    p = cache_seqlens[b] - s_q + i: the queries are the last of the cached keys. With p < 0 a query sees no key.

    q              [B, s_q, H, d] fp32, bf16 or fp16; if fp32, keys may be of any of these
    cache          [pages, P, 1, d] in q's dtype, or with is_fp8_kvcache [pages, P, 1, 656 | 584] bytes as
                   `kv_cache` lays them out (d = 576 or 512); a value is the first d_v numbers of its key
    block_table    [B, max_pages] int32: key s is at offset s % P of page block_table[b, s // P]. None, a ring: it is at
                   offset s % P of page b
    cache_seqlens  [B] int32, keys per sequence, the queries' own included
    window         keys that a query sees at most, itself included; at least 1. A ring has P >= window + s_q - 1; with a
                   block_table, a window above max_pages * P counts as that
    softmax_scale  multiplies the logits: a finite number
    d_v            at most d
    attn_sink      [H] fp32 or None, any value from -inf to +inf: out is scaled by e^lse / (e^lse + e^sink)

    Returns out [B, s_q, H, d_v] in q's dtype and lse [B, H, s_q] fp32 (natural log, without the sink). A query without
    keys has out 0 and lse +inf; a page outside the table or the cache holds no keys. NaN in a cached row reaches only
    the queries whose window holds it. Everything is fp32 in between.
    Raises TypeError or ValueError for other types, dtypes, shapes, strides and combinations.
    Source: DeepSeek-V4 (arXiv 2606.19348), the window branch.
    """
    check_window_decode(q, cache, block_table, cache_seqlens, window, softmax_scale, d_v, attn_sink, is_fp8_kvcache)
    check_memory("q", q)
    window = columns_of(window, block_table, cache)
    slots = window_slots(block_table, cache_seqlens, q.shape[1], cache.shape[1], window)
    out, lse = decode_sparse(q, (cache, slots, None), (None, None, None), d_v, softmax_scale, attn_sink)
    return out.to(q.dtype), lse


def columns_of(window: int, block_table: torch.Tensor | None, cache: torch.Tensor) -> int:
    """The window, or the keys that fit a sequence's row of block_table: memory is asked for no more."""
    return window if block_table is None else min(window, max(1, block_table.shape[1] * cache.shape[1]))


def check_window_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor,
    window: int,
    softmax_scale: float,
    d_v: int,
    attn_sink: torch.Tensor | None,
    is_fp8_kvcache: bool,
) -> None:
    """What `sliding_window_decode` asks of its arguments."""
    check_tensor("q", q, FLOATS, ("B", "s_q", "H", "d"))
    batch, s_q, _, d = q.shape
    check_flag("is_fp8_kvcache", is_fp8_kvcache)
    cached = cache_dim(cache)
    if is_fp8_kvcache != (cache.dtype in BYTE_DTYPES):
        accepted = "uint8, int8 or float8_e4m3fn" if is_fp8_kvcache else "float32, bfloat16 or float16"
        raise ValueError(f"cache: dtype must be {accepted} with is_fp8_kvcache={is_fp8_kvcache}, got {cache.dtype}")
    if not is_fp8_kvcache:
        check_keys_dtype(q, cache=cache)
    if cached != d:
        raise ValueError(f"cache: a last dimension of {cache.shape[-1]} means d = {cached}, but q has d = {d}")
    if cache.shape[0] * cache.shape[1] > 2**31:
        raise ValueError(f"cache: must have at most 2^31 slots, got {cache.shape[0]} pages of {cache.shape[1]}")
    check_tensor("cache_seqlens", cache_seqlens, INT32, (batch,), "q")
    check_positive("window", window)
    if block_table is not None:
        check_tensor("block_table", block_table, INT32, (batch, "max_pages"), "q")
    elif cache.shape[0] < batch or cache.shape[1] < window + s_q - 1:
        raise ValueError(
            f"cache: must have a page of at least window + s_q - 1 = {window + s_q - 1} keys for each of {batch} "
            f"sequences without a block_table, got {cache.shape[0]} pages of {cache.shape[1]} (sizes as of q)"
        )
    check_softmax(softmax_scale, d_v, attn_sink, q)
    check_same_device(("q", q), cache=cache, block_table=block_table, cache_seqlens=cache_seqlens)
