"""What several bridges ask of tensors before a launch."""

import torch

from dsa.runtime.checks import INT_MAX, MOST_SLOTS


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype's name as the compile functions take it."""
    return str(dtype).removeprefix("torch.")


def with_dims(x: torch.Tensor, dims: int) -> torch.Tensor:
    """x with so many dimensions, without a copy: the first ones merged, or new ones of a single element before them."""
    missing = dims - x.dim()
    if missing == 0:
        return x
    return x[(None,) * missing] if missing > 0 else x.view(-1, *x.shape[1 - dims :])


def check_slot_count(name: str, cache: torch.Tensor) -> None:
    """The kernels find a slot's page by a division of 32 bits."""
    if cache.shape[0] * cache.shape[1] > MOST_SLOTS:
        raise ValueError(f"{name}: the kernel takes at most 2^31 slots, got shape {list(cache.shape)}")


def check_page_size(name: str, cache: torch.Tensor) -> None:
    """The kernels count a cache's slots, and the bytes of a page, in 32 bits."""
    check_slot_count(name, cache)
    if _page_bytes(cache) > INT_MAX:
        raise ValueError(f"{name}: the kernel takes pages below 2^31 bytes, got shape {list(cache.shape)}")


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
