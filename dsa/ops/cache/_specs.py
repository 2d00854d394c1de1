"""Which caches and slots an op takes: the specs and rules that several ops share."""

import torch

from dsa.reference.cache.kv_cache import BYTE_DTYPES, V4_BYTES, V32_BYTES, is_v4, row_dim
from dsa.runtime.declare import FLOATS, PAGES, ROWS, Sizes, check_tensor

BYTES = (torch.uint8,)
SLOTS = (torch.int32, torch.int64)
CACHE_DTYPES = (*FLOATS, *BYTE_DTYPES)


def check_index_cache(name: str, cache: torch.Tensor) -> None:
    """ValueError for a cache of index keys without room for keys, or whose pages are not contiguous."""
    page_size, width = cache.shape[1], cache.shape[3]
    if width <= 4 or page_size == 0:
        raise ValueError(f"{name}: shape must be [pages, P >= 1, 1, D + 4 >= 5], got {list(cache.shape)}")
    if (page_size > 1 and cache.stride(1) != width) or cache.stride(3) != 1:
        raise ValueError(
            f"{name}: every page must be contiguous (strides [any, {width}, any, 1]), got strides "
            f"{list(cache.stride())}"
        )


def check_kv_cache(name: str, cache: torch.Tensor) -> Sizes:
    """ValueError for a cache of no layout of `dsa.reference.cache.kv_cache`. Returns its d."""
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
    """Checks that a tensor is such a cache, and returns its d."""
    check_tensor(name, cache, CACHE_DTYPES, ("pages", "P", 1, "d"))
    return check_kv_cache(name, cache)["d"]


def check_scales(cache: torch.Tensor, use_ue8m0: bool) -> None:
    """ValueError where the cache cannot store such scales."""
    if is_v4(cache) and not use_ue8m0:
        raise ValueError("use_ue8m0: must be True for the V4 layout, which stores powers of two only, got False")


def row_layout(cache: torch.Tensor) -> str:
    """The layout that kernels which access single rows ask of a cache."""
    return PAGES if is_v4(cache) else ROWS


def page_layout(cache: torch.Tensor) -> str:
    """The layout that kernels which read bytes page by page ask of a cache."""
    return PAGES if cache.dtype in BYTE_DTYPES else ROWS
