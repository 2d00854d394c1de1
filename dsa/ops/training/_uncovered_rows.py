"""Fill the rows of results that belong to no packed sequence: with 0, or with +inf if the result is an LSE."""

import math

import torch

from dsa.runtime import backends

MOST = 2**31 - 1


def fill_uncovered(bounds: torch.Tensor, *filled: tuple[torch.Tensor, float], most: int = MOST) -> None:
    """Fill the tensors' rows that belong to no sequence, and the rows of a sequence after its first `most` rows.

    bounds  int32 [B + 1], ascending from at least 0 to at most T: sequence b has the rows bounds[b] up to bounds[b + 1]
    filled  pairs of a tensor [T, ...] and a number, 0 or +inf, that is written to these rows. The tensors are fp32, or
            16-bit if the number is 0
    """
    from dsa.kernels.training.uncovered_rows_sm90 import INFINITY, ZERO, compile_uncovered_rows

    tensors = [words(x) for x, _ in filled]
    if 0 in (tensors[0].shape[0], max(x.numel() for x in tensors)):
        return
    launch = compile_uncovered_rows(tuple(INFINITY if value == math.inf else ZERO for _, value in filled))
    with backends.on_device(bounds):
        launch(bounds, tensors, min(most, MOST), backends.num_sms(bounds.device))


def words(x: torch.Tensor) -> torch.Tensor:
    """Return a view of x [T, a] or [T, a, b] as int32 with three dimensions and a contiguous last dimension."""
    if x.dim() == 2:
        x = x.unsqueeze(1 if x.stride(1) == 1 else 2)
    return x.view(torch.int32)
