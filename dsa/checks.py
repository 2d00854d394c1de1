"""Argument checks of the ops. Every message names the argument, says what it got and what is accepted."""

from collections.abc import Sequence

import torch


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tensor(name: str, value: object, dtypes: Sequence[torch.dtype], ndim: int | None = None) -> torch.Tensor:
    """`value` is a tensor of one of `dtypes`, with `ndim` dimensions if given."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: must be a torch.Tensor, got {type(value).__name__}")
    if value.dtype not in dtypes:
        raise ValueError(f"{name}: dtype must be {' or '.join(map(_dtype, dtypes))}, got {_dtype(value.dtype)}")
    if ndim is not None and value.dim() != ndim:
        raise ValueError(f"{name}: must have {ndim} dimensions, got shape {list(value.shape)}")
    return value


def same_device(first: str, a: torch.Tensor, second: str, b: torch.Tensor) -> None:
    if a.device != b.device:
        raise ValueError(f"{second}: must be on {first}'s device {a.device}, got {b.device}")
