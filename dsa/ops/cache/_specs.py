"""Paged caches and slots: specs, checks and limits that several ops share, and the view of a cache's pages for
kernels."""

import torch

from dsa.reference.cache.kv_cache import BYTE_DTYPES, V4_BYTES, V32_BYTES, is_v4, row_dim
from dsa.runtime.declare import FLOATS, INT_MAX, MOST_SLOTS, PAGES, ROWS, Accepted, Sizes, at_most, check_tensor

BYTES = (torch.uint8,)
SLOTS = (torch.int32, torch.int64)
CACHE_DTYPES = (*FLOATS, *BYTE_DTYPES)
COUNTED_SLOTS = {"pages*P": at_most(MOST_SLOTS)}  # the kernels find a slot's page by a 32-bit division


def check_index_cache(name: str, cache: torch.Tensor) -> None:
    """Raise ValueError if a cache of index keys has no room for a key or its pages are not contiguous."""
    page_size, width = cache.shape[1], cache.shape[3]
    if width <= 4 or page_size == 0:
        raise ValueError(f"{name}: shape must be [pages, P >= 1, 1, D + 4 >= 5], got {list(cache.shape)}")
    if (page_size > 1 and cache.stride(1) != width) or cache.stride(3) != 1:
        raise ValueError(
            f"{name}: every page must be contiguous (strides [any, {width}, any, 1]), got strides "
            f"{list(cache.stride())}"
        )


def check_kv_cache(name: str, cache: torch.Tensor) -> Sizes:
    """Return {"d": channels per row}. Raises ValueError if the cache has none of the layouts in
    `dsa.reference.cache.kv_cache`."""
    if cache.shape[1] == 0:
        raise ValueError(f"{name}: a page must hold at least one token, got shape {list(cache.shape)}")
    if cache.dtype in BYTE_DTYPES and cache.shape[-1] not in (V32_BYTES, V4_BYTES):
        raise ValueError(
            f"{name}: the last dimension of a byte cache must be {V32_BYTES} (V3.2) or {V4_BYTES} (V4), "
            f"got {cache.shape[-1]}"
        )
    if is_v4(cache) and ((cache.shape[1] > 1 and cache.stride(1) != V4_BYTES) or cache.stride(3) != 1):
        raise ValueError(
            f"{name}: every page of a V4 cache must be contiguous (strides [any, {V4_BYTES}, any, 1]), "
            f"got strides {list(cache.stride())}"
        )
    return {"d": row_dim(cache)}


def cache_dim(cache: torch.Tensor, name: str = "cache") -> int:
    check_tensor(name, cache, CACHE_DTYPES, ("pages", "P", 1, "d"))
    return check_kv_cache(name, cache)["d"]


def check_scales(cache: torch.Tensor, use_ue8m0: bool) -> None:
    """Raise ValueError if use_ue8m0 is False for a V4 cache, which can store only powers of two as scales."""
    if is_v4(cache) and not use_ue8m0:
        raise ValueError("use_ue8m0: must be True for the V4 layout, which stores powers of two only, got False")


def row_layout(cache: torch.Tensor) -> str:
    """Return the layout that kernels require of a cache if they access single rows. In a V4 page the scales of all
    tokens follow the rows, so whole V4 pages must be contiguous."""
    return PAGES if is_v4(cache) else ROWS


def page_layout(cache: torch.Tensor) -> str:
    """Return the layout of a cache for kernels that require contiguous pages in every byte cache."""
    return PAGES if cache.dtype in BYTE_DTYPES else ROWS


def slots_and_page_bytes(row: str) -> dict[str, Accepted]:
    """Return the limits of a cache with contiguous pages, whose bytes kernels count in int32. row: the bytes per row in
    names of the op's specs, for example "(D+4)"."""
    return COUNTED_SLOTS | {f"P*{row}": at_most(INT_MAX)}


def pages_as_rows(cache: torch.Tensor) -> torch.Tensor:
    """Return a view [pages, bytes] of a cache of layout PAGES. The stride of a single page is arbitrary; it is replaced
    by a multiple of 16 bytes, as kernels require."""
    width = _page_bytes(cache)
    stride = cache.stride(0) if cache.shape[0] > 1 else width + -width % 16
    return cache.as_strided((cache.shape[0], width), (stride, 1))


def _page_bytes(cache: torch.Tensor) -> int:
    return cache.shape[1] * cache.shape[2] * cache.shape[3]
