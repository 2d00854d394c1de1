"""What several bridges ask of tensors before a launch."""

import torch


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype's name as the compile functions take it."""
    return str(dtype).removeprefix("torch.")


def merged_rows(name: str, x: torch.Tensor) -> torch.Tensor:
    """x [..., K] as [T, K] with one row stride, without a copy, or a ValueError."""
    if x.dim() == 2:
        return x
    try:
        return x.view(-1, x.shape[-1])
    except RuntimeError:
        raise ValueError(
            f"{name}: all dimensions before the last must be mergeable into one with a single stride, got shape "
            f"{list(x.shape)} with strides {list(x.stride())}; pass {name}.contiguous()"
        ) from None


def check_slot_count(name: str, cache: torch.Tensor) -> None:
    """The kernels find a slot's page by a division of 32 bits."""
    if cache.shape[0] * cache.shape[1] > 2**31:
        raise ValueError(f"{name}: the kernel takes at most 2^31 slots, got shape {list(cache.shape)}")


def check_pages(name: str, cache: torch.Tensor) -> None:
    """A paged cache, each page contiguous, has pages that kernels can read: `pages_as_rows` of it."""
    check_slot_count(name, cache)
    if _page_bytes(cache) >= 2**31:  # the kernels count a page's bytes in 32 bits
        raise ValueError(f"{name}: the kernel takes pages below 2^31 bytes, got shape {list(cache.shape)}")
    stride = _page_stride(cache)
    if cache.data_ptr() % 16 or stride % 16:
        raise ValueError(
            f"{name}: pages must start at multiples of 16 bytes, got an address {cache.data_ptr() % 16} bytes past one "
            f"and a page stride of {stride} bytes"
        )


def pages_as_rows(cache: torch.Tensor) -> torch.Tensor:
    """A cache that `check_pages` lets pass as [pages, bytes]."""
    return cache.as_strided((cache.shape[0], _page_bytes(cache)), (_page_stride(cache), 1))


def _page_bytes(cache: torch.Tensor) -> int:
    return cache.shape[1] * cache.shape[2] * cache.shape[3]


def _page_stride(cache: torch.Tensor) -> int:
    """Of a single page, whose stride means nothing, one that kernels take."""
    width = _page_bytes(cache)
    return cache.stride(0) if cache.shape[0] > 1 else width + -width % 16


def unit_inner(x: torch.Tensor) -> torch.Tensor:
    """x, with a last stride of 1 where the last dimension has a single element and its stride means nothing."""
    if x.shape[-1] == 1 and x.stride(-1) != 1:
        return x.as_strided(x.shape, (*x.stride()[:-1], 1))
    return x
