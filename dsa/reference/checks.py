"""Argument checks of the references. Every message names the argument, says what it got and what is accepted."""

from collections.abc import Sequence

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INT32 = (torch.int32,)


def check_tensor(name: str, value: object, dtypes: Sequence[torch.dtype], shape: Sequence[int | str]) -> None:
    """`value` is a tensor of one of `dtypes` and of `shape`: an int is a size it must have, a str names any size."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: must be a torch.Tensor, got {type(value).__name__}")
    if value.dtype not in dtypes:
        accepted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise ValueError(f"{name}: dtype must be {accepted}, got {str(value.dtype).removeprefix('torch.')}")
    wrong = [want for want, got in zip(shape, value.shape) if isinstance(want, int) and want != got]
    if value.dim() != len(shape) or wrong:
        raise ValueError(f"{name}: shape must be [{', '.join(map(str, shape))}], got {list(value.shape)}")


def check_positive(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: must be an int, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name}: must be at least 1, got {value}")
