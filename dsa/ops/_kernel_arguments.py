"""Tensors in the form that kernels take."""

import torch

from dsa.runtime.declare import INT_MAX, MOST_SLOTS, Accepted, at_most


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype's name as the compile functions take it."""
    return str(dtype).removeprefix("torch.")


def with_dims(x: torch.Tensor, dims: int) -> torch.Tensor:
    """x with so many dimensions, without a copy: the first ones merged, or new ones of a single element before them."""
    missing = dims - x.dim()
    if missing == 0:
        return x
    return x[(None,) * missing] if missing > 0 else x.view(-1, *x.shape[1 - dims :])


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


def unit_inner(x: torch.Tensor) -> torch.Tensor:
    """x, with a last stride of 1 where the last dimension has a single element and its stride means nothing."""
    if x.shape[-1] == 1 and x.stride(-1) != 1:
        return x.as_strided(x.shape, (*x.stride()[:-1], 1))
    return x


def rows_at_16_bytes(x: torch.Tensor) -> torch.Tensor | None:
    """x if its last dimension is contiguous and its rows start at multiples of 16 bytes, None if not.

    The strides of dimensions with a single element mean nothing: where one would be in the way, x is viewed anew.
    """
    multiple = 16 // x.element_size()
    strides = list(x.stride())
    if strides[-1] == 1 and not any(s % multiple for s in strides[:-1]) and x.data_ptr() % 16 == 0:
        return x
    wrong = [i for i, s in enumerate(strides) if (s != 1 if i == x.dim() - 1 else s % multiple)]
    if x.data_ptr() % 16 or any(x.shape[i] > 1 for i in wrong):
        return None
    for i in wrong:
        strides[i] = 1 if i == x.dim() - 1 else multiple
    return x.as_strided(x.shape, strides)


def tma_rows(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy of it with rows at multiples of 16 bytes. A row may be in several places (a stride of 0)."""
    same = rows_at_16_bytes(x)
    return x.clone(memory_format=torch.contiguous_format) if same is None else same
