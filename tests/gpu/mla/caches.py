"""Views and slots of the caches that `dsa.cases.attention` fills."""

import torch

from dsa.cases.attention import all_rows

FEW_LAYOUTS = ["bf16, 576", "fp16, 512", "656 bytes", "584 bytes"]


def slots_of(cache):
    """(used, unused): the slots that hold keys, and those that hold NaN."""
    unused = all_rows(cache).isnan().any(1)
    return (~unused).nonzero()[:, 0], unused.nonzero()[:, 0]


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
