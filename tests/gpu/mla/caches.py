"""Access to caches that `dsa.cases.attention` has filled. Unused slots are NaN."""

import torch

from dsa.cases.attention import all_rows
from tests.gpu.attention import INF, NAN

FEW_LAYOUTS = ["bf16, 576", "fp16, 512", "656 bytes", "584 bytes"]


def slots_of(cache):
    """Return int64 indices (of slots with keys, of slots with NaN)."""
    unused = all_rows(cache).isnan().any(1)
    return (~unused).nonzero()[:, 0], unused.nonzero()[:, 0]


def v4_planes(cache):
    """Return views of the bytes of a cache of 584 bytes per token: (rows [pages, P, 576], scales [pages, P, 8])."""
    pages, page = cache.shape[:2]
    rows = cache.as_strided((pages, page, 576), (cache.stride(0), 576, 1))
    return rows, cache.as_strided((pages, page, 8), (cache.stride(0), 8, 1), 576 * page)


def garbage(cache, slots):
    """Fill these slots with one kind of extreme values or scales after another. Yields after each kind."""
    if cache.dtype != torch.uint8:
        for value in (NAN, INF, -INF, 0.0):
            cache.view(-1, cache.shape[3])[slots] = value
            yield
    elif cache.shape[3] == 656:
        rows = cache.view(-1, 656)
        for value, scale in ((0x7F, NAN), (0x00, NAN), (0x7F, 1.0), (0x01, INF)):
            rows[slots] = value
            rows[slots, 512:528] = torch.full((4,), scale, device="cuda").view(torch.uint8)
            yield
    else:
        rows, scales = v4_planes(cache)
        page, offset = slots // cache.shape[1], slots % cache.shape[1]
        for value, scale in ((0x7F, 0xFF), (0x00, 0xFF), (0x7F, 0x7F), (0xFF, 0x00)):
            rows[page, offset], scales[page, offset] = value, scale
            scales[..., 7] = value  # the pad byte
            yield
