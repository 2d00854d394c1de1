"""What tests of the references share."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch


def i32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def assert_same_bits(got: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> None:
    """The same dtypes, shapes and bytes, including the bytes of NaN and the signs of zeros."""
    for x, y in zip(got, expected, strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert torch.equal(x.flatten().view(torch.uint8), y.flatten().view(torch.uint8))


def assert_refused(message: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    """The call raises an error whose text matches the pattern `message`."""
    with pytest.raises((TypeError, ValueError), match=message):
        call(*arguments, **options)
