"""Operands of products: checks of tuples of values and scales, and of `weights` and `expected_rows` of grouped
products."""

import torch

from dsa.runtime.declare import check_pair

# The shapes of scales of activations and of E weights. The second ones have more columns, a multiple of 4.
SCALES = "A ceil(K/128) | A 4*ceil(K/512)"
WEIGHT_SCALES = "E ceil(N/128) ceil(K/128) | E ceil(N/128) 4*ceil(K/512)"


def scale_columns(channels: int, padded: bool) -> int:
    """Return the number of scales of a row: one per 128 channels, if `padded` rounded up to a multiple of 4."""
    return -(-channels // 512) * 4 if padded else -(-channels // 128)


def without_padding(scale: torch.Tensor, channels: int) -> torch.Tensor:
    """Write zeros to the columns that pad a row's scales, and return the other columns as a view."""
    columns = scale_columns(channels, False)
    if scale.shape[1] > columns:
        scale[:, columns:] = 0.0
    return scale[:, :columns]


def pair(name: str, value: object) -> tuple:
    """Return an FP8 operand as (values, scales). Raises TypeError if it is not a pair."""
    return check_pair(name, value, "(e4m3 values, fp32 scales)")


def fp4_weight(name: str, value: object) -> tuple:
    """Return an FP4 weight as (packed values, scales of groups, scales of blocks). Raises TypeError for anything
    else."""
    if not isinstance(value, (tuple, list)) or len(value) != 3:
        got = f"{len(value)} of them" if isinstance(value, (tuple, list)) else type(value).__name__
        raise TypeError(f"{name}: must be (FP4 values, e8m0 scales, fp32 block scales), got {got}")
    return tuple(value)


def check_rows(
    q: torch.Tensor, rows: torch.Tensor | None, weights: torch.Tensor | None, expected_rows: int | None
) -> None:
    """Check `weights` and `expected_rows` of a grouped product."""
    if rows is None and weights is not None and len(weights) != len(q):
        raise ValueError(f"weights: shape must be [{len(q)}], got [{len(weights)}] (sizes as of a[0], without rows)")
    check_expected_rows(q, rows, expected_rows)


def check_expected_rows(q: torch.Tensor, rows: torch.Tensor | None, expected_rows: int | None) -> None:
    count, origin = (len(q), "a[0], without rows") if rows is None else (len(rows), "rows")
    if expected_rows is not None and expected_rows > count:
        raise ValueError(f"expected_rows: must be at most M = {count}, got {expected_rows} (sizes as of {origin})")
