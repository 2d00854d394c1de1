"""What several bridges ask of tensors before a launch."""

import torch


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype's name as the compile functions take it."""
    return str(dtype).removeprefix("torch.")


def check_same_device(first: tuple[str, torch.Tensor], **others: torch.Tensor) -> None:
    """All tensors are on the first one's device."""
    name, tensor = first
    for other, value in others.items():
        if value.device != tensor.device:
            raise ValueError(f"{other}: must be on {name}'s device {tensor.device}, got {value.device}")


def check_rows(name: str, x: torch.Tensor) -> None:
    """x's last dimension is contiguous and its rows start at multiples of 16 bytes."""
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(f"{name}: the last dimension must be contiguous, got strides {list(x.stride())}")
    strides = [s * x.element_size() for s, n in zip(x.stride()[:-1], x.shape[:-1]) if n > 1]
    if x.data_ptr() % 16 or any(s % 16 for s in strides):
        raise ValueError(
            f"{name}: rows must start at multiples of 16 bytes, got an address {x.data_ptr() % 16} bytes past one and "
            f"strides of {strides} bytes"
        )


def pages_as_rows(name: str, cache: torch.Tensor) -> torch.Tensor:
    """A paged cache, each page contiguous, as [pages, bytes]; pages start at multiples of 16 bytes."""
    pages, width = cache.shape[0], cache.shape[1] * cache.shape[2] * cache.shape[3]
    stride = cache.stride(0) if pages > 1 else width + -width % 16  # a single page's stride means nothing
    if cache.data_ptr() % 16 or stride % 16:
        raise ValueError(
            f"{name}: pages must start at multiples of 16 bytes, got an address {cache.data_ptr() % 16} bytes past one "
            f"and a page stride of {stride} bytes"
        )
    return cache.as_strided((pages, width), (stride, 1))


def unit_inner(x: torch.Tensor) -> torch.Tensor:
    """x, with a last stride of 1 where the last dimension has a single element and its stride means nothing."""
    if x.shape[-1] == 1 and x.stride(-1) != 1:
        return x.as_strided(x.shape, (*x.stride()[:-1], 1))
    return x
