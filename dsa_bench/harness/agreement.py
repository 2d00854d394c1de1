"""Whether a peer's result is ours, loosely: a kernel that computes something else is no peer."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from dsa.testing import calc_diff

ROWS = 64  # of a result that are compared
TOLERANCE = 1e-3  # of `calc_diff`: roundings give 1e-5, another key or scale 0.01 and more


def first(result: Any) -> torch.Tensor:
    """A result's first tensor: the output beside which others have LSEs and the like."""
    return result if isinstance(result, torch.Tensor) else result[0]


def some(rows: int) -> slice:
    """About ROWS of so many rows, evenly spaced."""
    return slice(None, None, max(1, rows // ROWS))


def agree(got: Any, ours: Any) -> None:
    """Raises AssertionError unless all tensors that both give agree on some of their rows.

    A peer may have added padding behind ours in any dimension. Of a cast, e4m3 values and fp32 scales, the products are
    compared: a scale may round to another power of two.
    """
    pairs = [_rows(*pair) for pair in zip(_tensors(got), _tensors(ours))]
    if not pairs:
        raise AssertionError("differs: no tensor to compare")
    while pairs:
        values = pairs.pop(0)
        if values[1].dtype == torch.float8_e4m3fn and pairs:
            values = tuple(map(_numbers, values, pairs.pop(0)))
        close(*values)


def agree_attention(got: Any, ours: Any) -> None:
    """Raises AssertionError unless the outputs agree, and the LSEs, the last tensors, where both have them with ours'
    dimensions. A peer's LSE may be to the base 2."""
    (out, *rest), (own, *own_rest) = _tensors(got), _tensors(ours)
    agree(out, own)
    if not rest or not own_rest or not _covers(rest[-1], own_rest[-1]):
        return
    lse, own = _rows(rest[-1], own_rest[-1])
    try:
        close(lse, own)
    except AssertionError as error:
        try:
            close(lse * math.log(2), own)
        except AssertionError:
            raise AssertionError(f"LSE {error}") from None


def close(got: torch.Tensor, ours: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    """Raises AssertionError unless calc_diff is below the tolerance and what is not finite is equal."""
    if not (diff := calc_diff(got, ours)) < tolerance:
        raise AssertionError(f"differs by {diff:.2g}")


def _tensors(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    values = result.values() if isinstance(result, Mapping) else result or ()
    return [value for value in values if isinstance(value, torch.Tensor)]


def _covers(got: torch.Tensor, ours: torch.Tensor) -> bool:
    return got.dim() == ours.dim() and all(a >= b for a, b in zip(got.shape, ours.shape))


def _rows(got: torch.Tensor, ours: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Some rows of both, without a peer's padding."""
    if not _covers(got, ours):
        raise AssertionError(f"differs: shape {list(got.shape)}, where ours is {list(ours.shape)}")
    rows = some(len(ours))
    return got[tuple(slice(n) for n in ours.shape)][rows], ours[rows]


def _numbers(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """fp32 [*scales.shape, group]: each scale is that of as many neighbouring channels."""
    return values.float().reshape(*scales.shape, -1) * scales.float()[..., None]
