"""Loose comparisons of a peer's result with ours. A kernel that computes something else fails them and is not timed."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

import dsa
from dsa.testing import calc_diff

ROWS = 64  # about this many rows are compared per result
RECALL = 0.98  # fraction of a peer's selected keys that must be right by default (`agree_selected`)
TOLERANCE = 1e-3  # limit of `calc_diff`: other rounding causes 1e-5, a wrong key or scale 0.01 and more


def first(result: Any) -> torch.Tensor:
    """Return the result if it is a tensor, otherwise its first tensor, which is the output."""
    return result if isinstance(result, torch.Tensor) else result[0]


def some(rows: int) -> slice:
    """Return a slice of about ROWS of `rows` rows, evenly spaced."""
    return slice(None, None, max(1, rows // ROWS))


def agree(got: Any, ours: Any) -> None:
    """Raise AssertionError unless the tensors of both results, paired in order, agree on some of their rows (`close`).
    If one result has more tensors than the other, its last tensors are ignored.

    A peer's tensor may have padding at the end of any dimension. For e4m3 values that are followed by their scales, the
    products of values and scales are compared. A peer can round a scale to another power of two.
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
    """Raise AssertionError unless the outputs agree and the LSEs agree. The first tensor of a result is the output, the
    last the LSE. LSEs are compared only if both results have one. The peer's LSE can be padded and can have base 2."""
    (out, *rest), (our_out, *our_rest) = _tensors(got), _tensors(ours)
    agree(out, our_out)
    if rest and our_rest and _covers(rest[-1], our_rest[-1]):
        lse, expected = _rows(rest[-1], our_rest[-1])
        natural, binary = (calc_diff(lse * unit, expected) for unit in (1, math.log(2)))
        if not natural < TOLERANCE and not binary < TOLERANCE:
            raise AssertionError(f"LSE differs by {natural:.2g}")


def close(got: torch.Tensor, ours: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    """Raise AssertionError unless `calc_diff` is below the tolerance. `calc_diff` is infinite if non-finite entries
    differ."""
    if not (diff := calc_diff(got, ours)) < tolerance:
        raise AssertionError(f"differs by {diff:.2g}")


def as_reference(
    call: Callable[[], torch.Tensor], tolerance: float, seen: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> Callable[[torch.Tensor], None]:
    """Return a check that raises AssertionError unless `calc_diff` between a result and the reference's result is below
    the tolerance.

    call: our call, which the check runs with the backend "reference". seen: the reference's result -> the index of the
    entries that are compared; None: all.
    """

    def check(got: torch.Tensor) -> None:
        with dsa.use_backend("reference"):
            expected = call()
        entries = ... if seen is None else seen(expected)
        if not (diff := calc_diff(got[entries], expected[entries])) < tolerance:
            raise AssertionError(f"calc_diff {diff:.2g}")

    return check


def agree_selected(
    got: Any, ours: torch.Tensor, keys: int, scores: torch.Tensor | None = None, least: float = RECALL
) -> None:
    """Compare some rows of a peer's selection `got` with ours, int32 [rows, k]. Raise AssertionError unless each row
    has k different keys from 0 to `keys` - 1, and enough of them are right.

    Without `scores`, the fraction `least` of the keys must be in our selection. With `scores` [rows, keys], this
    fraction must have scores that are not below the lowest score of our selection. Peers break ties arbitrarily, and
    some compare fewer bits.
    """
    rows = some(len(ours))
    selected, expected = first(got)[rows].long(), ours[rows].long()
    if selected.shape != expected.shape or not ((selected >= 0) & (selected < keys)).all():
        raise AssertionError(f"differs: not {expected.shape[1]} keys of each row")
    if (selected.sort(1).values.diff(dim=1) == 0).any():
        raise AssertionError("differs: a key is there twice")
    if scores is None:
        both = torch.cat((selected, expected), 1).sort(1).values
        recall, what = (both.diff(dim=1) == 0).sum().item() / expected.numel(), "ours"
    else:
        lowest = scores[rows].gather(1, expected).amin(1, keepdim=True)
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
    """Return some rows of both tensors, without the peer's padding."""
    if not _covers(got, ours):
        raise AssertionError(f"differs: shape {list(got.shape)}, where ours is {list(ours.shape)}")
    rows = some(len(ours))
    return got[tuple(slice(n) for n in ours.shape)][rows], ours[rows]


def _numbers(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return fp32 [..., groups, channels / groups]: values [..., channels] times scales [..., groups]. A scale belongs
    to a group of adjacent channels."""
    return values.float().reshape(*scales.shape, -1) * scales.float()[..., None]
