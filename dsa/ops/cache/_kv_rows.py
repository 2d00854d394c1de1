"""The MLA cache and its slots as the kernels take them."""

import torch

from dsa.kernels.cache.limits import CHANNEL_MULTIPLE
from dsa.ops._aligned import rows_at_16_bytes
from dsa.ops._kernel_arguments import check_rows, check_slot_count, dtype_name, pages_as_rows, unit_inner
from dsa.reference.cache.kv_cache import BYTE_DTYPES, V4_BYTES, V4_ROW


def layout_name(cache: torch.Tensor) -> str:
    """ "v32" or "v4" for bytes, else the dtype's name."""
    if cache.dtype in BYTE_DTYPES:
        return "v4" if cache.shape[3] == V4_BYTES else "v32"
    return dtype_name(cache.dtype)


def cache_rows(cache: torch.Tensor) -> torch.Tensor:
    """[pages, P, row]: floats, or bytes as uint8; of a V4 cache the rows, which the page's scales follow."""
    pages, page_size = cache.shape[:2]
    if cache.dtype not in BYTE_DTYPES:
        if cache.shape[3] % CHANNEL_MULTIPLE:
            floats = f"float rows of {CHANNEL_MULTIPLE} n channels"
            raise ValueError(f"cache: the Hopper kernel takes {floats}, got {cache.shape[3]}")
    else:
        cache = cache.view(torch.uint8)
        if cache.shape[3] == V4_BYTES:
            whole = pages_as_rows("cache", cache)
            return whole.as_strided((pages, page_size, V4_ROW), (whole.stride(0), V4_ROW, 1))
    check_slot_count("cache", cache)
    check_rows("cache", cache)
    return rows_at_16_bytes(cache.select(2, 0))


def float_rows(name: str, x: torch.Tensor) -> torch.Tensor:
    """x [T, d], each row at a multiple of 16 bytes."""
    check_rows(name, x)
    return rows_at_16_bytes(x)


def slot_words(slots: torch.Tensor) -> torch.Tensor:
    """The slots in a row; int64 as pairs of int32."""
    if not slots.is_contiguous():
        raise ValueError(f"slots: must be contiguous, got strides {list(slots.stride())}")
    return unit_inner(slots.view(-1)).view(torch.int32)
