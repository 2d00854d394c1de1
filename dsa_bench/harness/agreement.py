"""Whether a peer's result is ours, loosely: a kernel that computes something else is no peer."""

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
    """Raises AssertionError unless the first tensors agree on some of their rows. A peer may have added padding behind
    ours in any dimension."""
    got, ours = first(got), first(ours)
    if got.dim() != ours.dim() or any(a < b for a, b in zip(got.shape, ours.shape)):
        raise AssertionError(f"differs: shape {list(got.shape)}, where ours is {list(ours.shape)}")
    rows = some(len(ours))
    close(got[tuple(slice(n) for n in ours.shape)][rows], ours[rows])


def close(got: torch.Tensor, ours: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    """Raises AssertionError unless calc_diff is below the tolerance and what is not finite is equal."""
    if not (diff := calc_diff(got, ours)) < tolerance:
        raise AssertionError(f"differs by {diff:.2g}")
