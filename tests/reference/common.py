"""Tensors and assertions that tests of the references share."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch

from dsa.cases.case import same_bits

BF16, E4M3, F16, F32, F64 = torch.bfloat16, torch.float8_e4m3fn, torch.float16, torch.float32, torch.float64
BYTE, INT32 = torch.uint8, torch.int32
INF, NAN = math.inf, math.nan


def i32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=INT32)


def i64(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def zeros(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.zeros(shape).to(dtype)


def assert_same_bits(got: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> None:
    """Require the same dtypes, shapes and bytes, including the bytes of NaN and the signs of zeros."""
    for x, y in zip(got, expected, strict=True):
        assert same_bits(x, y)


def assert_close(got: Iterable[torch.Tensor], expected: Iterable[torch.Tensor], tolerance: float = 2e-5) -> None:
    """Require results within `tolerance`, absolute plus relative, in float64."""
    for x, y in zip(got, expected):
        torch.testing.assert_close(x.double(), y.double(), rtol=tolerance, atol=tolerance)


def assert_same_gradients(function: Callable, formula: Callable, inputs: Sequence[torch.Tensor]) -> None:
    """Require equal gradients of the sums of squares, within 1e-4. The function gets fp32 inputs, the formula
    float64."""
    gradients = []
    for compute, dtype in ((function, F32), (formula, F64)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        gradients.append(torch.autograd.grad(compute(*leaves).square().sum(), leaves))
    assert_close(*gradients, tolerance=1e-4)


def assert_refused(message: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call(*arguments, **options)
