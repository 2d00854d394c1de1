"""Paged caches in the form that kernels take, and limits of their sizes."""

import torch

from dsa.runtime.declare import INT_MAX, MOST_SLOTS, Accepted, at_most

COUNTED_SLOTS = {"pages*P": at_most(MOST_SLOTS)}  # the kernels find a slot's page by a 32-bit division


def slots_and_page_bytes(row: str) -> dict[str, Accepted]:
    """Limits of a cache with contiguous pages and rows of `row` bytes: the kernels count a page's bytes in 32 bits."""
    return COUNTED_SLOTS | {f"P*{row}": at_most(INT_MAX)}


def pages_as_rows(cache: torch.Tensor) -> torch.Tensor:
    """A cache whose layout is PAGES as [pages, bytes]; a single page, whose stride means nothing, gets one that kernels
    take."""
    width = _page_bytes(cache)
    stride = cache.stride(0) if cache.shape[0] > 1 else width + -width % 16
    return cache.as_strided((cache.shape[0], width), (stride, 1))


def _page_bytes(cache: torch.Tensor) -> int:
    return cache.shape[1] * cache.shape[2] * cache.shape[3]
