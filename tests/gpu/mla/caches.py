"""Paged caches of every layout, whose unused rows are NaN."""

import torch

from dsa.reference.cache import kv_cache
from dsa.testing import poisoned
from tests.gpu.attention import BF16, FP16, normal

# name -> d, dtype of q
LAYOUTS = {
    "bf16, 576": (576, BF16),
    "bf16, 512": (512, BF16),
    "fp16, 576": (576, FP16),
    "fp16, 512": (512, FP16),
    "656 bytes": (576, BF16),
    "656 bytes, any scales": (576, BF16),
    "584 bytes": (512, BF16),
    "584 bytes, unpadded": (512, BF16),
}
FEW_LAYOUTS = ["bf16, 576", "fp16, 512", "656 bytes", "584 bytes"]


def empty_cache(layout, pages, page):
    """A cache that is NaN everywhere, between its pages too."""
    d, dtype = LAYOUTS[layout]
    if layout == "584 bytes":
        cache = kv_cache.make_v4_cache(pages, page, "cuda")
        cache.as_strided((pages * cache.stride(0),), (1,)).fill_(0xFF)
        return cache
    if "bytes" in layout:
        return poisoned((pages, page, 1, int(layout[:3])), torch.uint8, "cuda")
    return poisoned((pages, page, 1, d), dtype, "cuda")


def make_cache(layout, rows, page):
    """A cache of about twice `rows` rows, and the slots of those that are not NaN, in any order."""
    pages = -(-2 * rows // page) + 1
    cache = empty_cache(layout, pages, page)
    slots = torch.randperm(pages * page, device="cuda")[:rows]
    any_scales = layout.endswith("any scales")
    kv = normal(rows, LAYOUTS[layout][0], dtype=torch.float32)
    kv_cache.write_kv_cache(kv, cache, slots, use_ue8m0=not any_scales)
    if any_scales:  # half of them by the largest number of a group, as quantised, and half of no origin
        scales = cache.view(-1, 656)[:, 512:528].view(torch.float32)
        some = slots[: rows // 2]
        scales[some] = scales[some] * (0.5 + torch.rand(len(some), 4, device="cuda"))
    return cache, slots


def unused_slots(cache, slots):
    """Those that hold NaN."""
    used = torch.zeros(cache.shape[0] * cache.shape[1], dtype=torch.bool, device="cuda")
    used[slots] = True
    return (~used).nonzero()[:, 0]


def v4_planes(cache):
    """Rows [pages, P, 576] and scales [pages, P, 8] of a cache of 584 bytes a token."""
    pages, page = cache.shape[:2]
    rows = cache.as_strided((pages, page, 576), (cache.stride(0), 576, 1))
    return rows, cache.as_strided((pages, page, 8), (cache.stride(0), 8, 1), 576 * page)


def with_gaps(layout, cache):
    """The cache with other bytes between its pages; a float one also as one head of two."""
    pages, page, _, width = cache.shape
    stride = cache.stride(0) + 16 * 36
    filler = 0xFF if "bytes" in layout else torch.nan
    wide = torch.full((pages * stride,), filler, dtype=cache.dtype, device="cuda")
    yield wide.as_strided(cache.shape, (stride, width, width, 1)).copy_(cache)
    if "bytes" not in layout:
        heads = torch.full((pages, page, 2, width), filler, dtype=cache.dtype, device="cuda")
        yield heads[:, :, 1:].copy_(cache)
