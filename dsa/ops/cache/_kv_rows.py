"""Views of the MLA cache and of slots with the shapes and dtypes that the kernels accept."""

import torch

from dsa.kernels.cache.limits import CHANNEL_MULTIPLE
from dsa.ops.cache._specs import pages_as_rows
from dsa.reference.cache.kv_cache import BYTE_DTYPES, V4_BYTES, V4_ROW, is_v4
from dsa.runtime.declare import INT_MAX, dtype_name, rows_at_16_bytes, unit_inner


def layout_name(cache: torch.Tensor) -> str:
    """Return "v32" or "v4" for a byte cache, the dtype's name for a float cache."""
    if cache.dtype in BYTE_DTYPES:
        return "v4" if is_v4(cache) else "v32"
    return dtype_name(cache.dtype)


def check_cache(cache: torch.Tensor) -> None:
    """Raise ValueError for a cache whose sizes the kernels do not accept."""
    if cache.dtype not in BYTE_DTYPES and cache.shape[3] % CHANNEL_MULTIPLE:
        raise ValueError(
            f"cache: the kernel takes float rows of a multiple of {CHANNEL_MULTIPLE} channels, got {cache.shape[3]}"
        )
    if is_v4(cache) and (size := cache.shape[1] * V4_BYTES) > INT_MAX:
        raise ValueError(f"cache: the kernel takes pages of at most {INT_MAX} bytes, got {size}")


def cache_rows(cache: torch.Tensor) -> torch.Tensor:
    """Return a view of the cache's rows: [pages, P, d] floats, or uint8 [pages, P, 656] (V3.2) or [pages, P, 576] (V4).
    The scales of a V4 page are outside the view."""
    if cache.dtype in BYTE_DTYPES:
        cache = cache.view(torch.uint8)
        if is_v4(cache):
            whole = pages_as_rows(cache)
            return whole.as_strided((*cache.shape[:2], V4_ROW), (whole.stride(0), V4_ROW, 1))
    return rows_at_16_bytes(cache.select(2, 0))


def slot_words(slots: torch.Tensor) -> torch.Tensor:
    """Return a one-dimensional int32 view of contiguous slots. An int64 slot becomes two words."""
    return unit_inner(slots.view(-1)).view(torch.int32)
