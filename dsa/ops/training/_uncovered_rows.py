"""Fill the rows of results that are in no packed sequence: with zeros, or with an empty row's +inf."""

import math

import torch

from dsa.runtime import backends

MOST = 2**31 - 1


def fill_uncovered(bounds: torch.Tensor, *filled: tuple[torch.Tensor, float], most: int = MOST) -> None:
    """Fill the rows of tensors [T, ...] that are in no sequence, and the rows of a sequence after its first `most`,
    with 0 or +inf. The tensors are fp32 or, for 0, of 16 bits.

    bounds  int32 [B + 1], ascending from 0 to T at most: where sequences begin, and where the last one ends
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
