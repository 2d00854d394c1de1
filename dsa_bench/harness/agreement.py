"""Whether a peer's result agrees loosely with ours. A kernel that computes something else is not a peer."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from dsa.testing import calc_diff

ROWS = 64  # compared per result
RECALL = 0.98  # of our selected keys that a peer must have selected
TOLERANCE = 1e-3  # of `calc_diff`: roundings give 1e-5, another key or scale 0.01 and more


def first(result: Any) -> torch.Tensor:
    """A result's first tensor: the output, before LSEs and the like."""
    return result if isinstance(result, torch.Tensor) else result[0]


def some(rows: int) -> slice:
    """About ROWS of so many rows, evenly spaced."""
    return slice(None, None, max(1, rows // ROWS))


def agree(got: Any, ours: Any) -> None:
    """Raises AssertionError unless all tensors that both give agree on some of their rows.

    A peer may have padding at the end of any dimension. A cast, e4m3 values and fp32 scales, is compared by the
    products: a scale may round to another power of two.
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
    """Raises AssertionError unless the outputs agree, and the LSEs, the last tensors, where both have them in the same
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
    """Raises AssertionError unless calc_diff is below the tolerance and non-finite entries are equal."""
    if not (diff := calc_diff(got, ours)) < tolerance:
        raise AssertionError(f"differs by {diff:.2g}")


def agree_selected(
    got: Any, ours: torch.Tensor, keys: int, scores: torch.Tensor | None = None, least: float = RECALL
) -> None:
    """Raises AssertionError unless each row of `got` has as many different keys as ours, of 0 to `keys` - 1, and at
    least the share `least` of them are ours, in any order; or, with the scores [rows, keys], score at least as high as
    our lowest: peers break ties arbitrarily, and some compare fewer bits."""
    rows = some(len(ours))
    selected, own = first(got)[rows].long(), ours[rows].long()
    if selected.shape != own.shape or not ((selected >= 0) & (selected < keys)).all():
        raise AssertionError(f"differs: not {own.shape[1]} keys of each row")
    if (selected.sort(1).values.diff(dim=1) == 0).any():
        raise AssertionError("differs: a key is there twice")
    if scores is None:
        both = torch.cat((selected, own), 1).sort(1).values
        recall, what = (both.diff(dim=1) == 0).sum().item() / own.numel(), "ours"
    else:
        lowest = scores[rows].gather(1, own).amin(1, keepdim=True)
        recall, what = (scores[rows].gather(1, selected) >= lowest).float().mean().item(), "as high as ours"
    if recall < least:
        raise AssertionError(f"differs: {recall:.1%} of the keys are {what}")


def _tensors(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    values = result.values() if isinstance(result, Mapping) else result or ()
    return [value for value in values if isinstance(value, torch.Tensor)]


def _covers(got: torch.Tensor, ours: torch.Tensor) -> bool:
    return got.dim() == ours.dim() and all(a >= b for a, b in zip(got.shape, ours.shape))


def _rows(got: torch.Tensor, ours: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Some rows of both, without the peer's padding."""
    if not _covers(got, ours):
        raise AssertionError(f"differs: shape {list(got.shape)}, where ours is {list(ours.shape)}")
    rows = some(len(ours))
    return got[tuple(slice(n) for n in ours.shape)][rows], ours[rows]


def _numbers(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """fp32 [*scales.shape, group]: each scale belongs to equally many neighbouring channels."""
    return values.float().reshape(*scales.shape, -1) * scales.float()[..., None]
