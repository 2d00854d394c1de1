"""Checks of the boundaries of packed sequences in training."""

from collections.abc import Iterator

import torch

Named = tuple[str, torch.Tensor]


def sequence_ranges(
    cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, queries: Named, keys: Named
) -> Iterator[tuple[int, int, int, int]]:
    """Yield (first query, end, first key, end) of each sequence, as rows of the tensors in `queries` and `keys`.

    queries, keys: (the argument's name for error messages, the tensor). Raise ValueError as `boundaries` does.
    """
    q, k = boundaries("cu_seqlens_q", cu_seqlens_q, queries), boundaries("cu_seqlens_k", cu_seqlens_k, keys)
    return zip(q, q[1:], k, k[1:])


def boundaries(name: str, x: torch.Tensor, rows: Named) -> list[int]:
    """Return `x` as a list. Raise ValueError unless it ascends from 0 to the number of rows of the tensor in `rows`."""
    numbers, end = x.tolist(), len(rows[1])
    if not numbers or numbers[0] != 0 or numbers[-1] != end or numbers != sorted(numbers):
        raise ValueError(f"{name}: must ascend from 0 to {end}, got {numbers} (sizes as of {rows[0]})")
    return numbers
