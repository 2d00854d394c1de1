"""Rows of results over packed sequences that no sequence has: zeros, or what an empty row has."""

import math

import torch

from dsa.runtime import backends

MOST = 2**31 - 1


def fill_uncovered(bounds: torch.Tensor, *filled: tuple[torch.Tensor, float], most: int = MOST) -> None:
    """Set the rows of tensors [T, ...], their numbers in 16 bits or fp32, that are in none of the sequences, and those
    of each sequence behind its first `most`, to a number: 0, or of fp32 +inf.

    bounds  int32 [B + 1], ascending from 0 to T at most: where sequences begin, and the last one's end
    """
    from dsa.kernels.training.uncovered_rows_sm90 import INFINITY, ZERO, compile_uncovered_rows

    tensors = [words(x) for x, _ in filled]
    if 0 in (tensors[0].shape[0], max(x.numel() for x in tensors)):
        return
    launch = compile_uncovered_rows(tuple(INFINITY if value == math.inf else ZERO for _, value in filled))
    with backends.on_device(bounds):
        launch(bounds, tensors, min(most, MOST), backends.num_sms(bounds.device))


def words(x: torch.Tensor) -> torch.Tensor:
    """x of two or three dimensions as int32 [T, ., .], whose last dimension is contiguous."""
    if x.dim() == 2:
        x = x.unsqueeze(1 if x.stride(1) == 1 else 2)
    return x.view(torch.int32)
