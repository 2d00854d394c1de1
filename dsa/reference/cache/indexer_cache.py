"""Paged cache of the lightning indexer's keys: FP8 e4m3 with one fp32 scale per token.

cache is [pages, P, 1, D + 4] uint8, but this shape only gives the number of bytes. A page stores the P x D values of
all its tokens first, then the P fp32 scales (little endian). Each page is contiguous, and cache.stride(0) is the
distance between pages. Source: DeepGEMM's `kv_cache` of `fp8_paged_mqa_logits`.
"""

import torch


def write_indexer_cache(k: torch.Tensor, k_scale: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Write token t's key and scale into slot slots[t] = page * P + offset, in place.

    Slot -1 skips the token. No other byte of the cache changes. Raises ValueError, before it writes, for a slot below
    -1 or beyond the cache. Arguments as in `dsa.write_indexer_cache`.
    """
    values, scales = _planes(cache)
    capacity = cache.shape[0] * cache.shape[1]
    check_writable_slots(slots, capacity)
    keep = slots >= 0
    page, offset = split_slots(slots[keep], cache.shape[1])
    values[page, offset] = k[keep].view(torch.uint8)
    scales[page, offset] = k_scale[keep].contiguous().view(torch.uint8).view(-1, 4)


def read_indexer_cache(cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and scales in `slots`: (k [T, D] e4m3, k_scale [T] fp32), zeros for slots outside the cache.

    Arguments as in `dsa.read_indexer_cache`; the reference has no k and k_scale to write to.
    """
    values, scales = _planes(cache)
    valid = (slots >= 0) & (slots < cache.shape[0] * cache.shape[1])
    page, offset = split_slots(slots[valid], cache.shape[1])
    k = torch.zeros(len(slots), values.shape[2], dtype=torch.uint8, device=cache.device)
    k[valid] = values[page, offset]
    k_scale = torch.zeros(len(slots), 4, dtype=torch.uint8, device=cache.device)
    k_scale[valid] = scales[page, offset]
    return k.view(torch.float8_e4m3fn), k_scale.view(torch.float32).squeeze(1)


def split_slots(slots: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    slots = slots.long()
    return slots // page_size, slots % page_size


def check_writable_slots(slots: torch.Tensor, capacity: int) -> None:
    bad = (slots < -1) | (slots >= capacity)
    if bad.any():
        raise ValueError(f"slots: must be -1 or in [0, {capacity}), got {slots[bad][0].item()} (sizes as of cache)")


def _planes(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of the cache's bytes: values [pages, P, D] and scales [pages, P, 4]."""
    pages, page_size, _, width = cache.shape
    d = width - 4
    page_stride = cache.stride(0)
    values = cache.as_strided((pages, page_size, d), (page_stride, d, 1), cache.storage_offset())
    scales = cache.as_strided((pages, page_size, 4), (page_stride, 4, 1), cache.storage_offset() + page_size * d)
    return values, scales
