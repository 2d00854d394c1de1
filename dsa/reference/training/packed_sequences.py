"""Packed sequences of training: where they begin and end in the rows of queries and keys."""

from collections.abc import Iterator

import torch

from dsa.runtime.arguments import Int, Tensor
from dsa.runtime.checks import INT32

SEQUENCES = {
    "cu_seqlens_q": Tensor("B+1", INT32),
    "cu_seqlens_k": Tensor("B+1", INT32),
    "max_seqlen_q": Int(least=0),
    "max_seqlen_k": Int(least=0),
}
Named = tuple[str, torch.Tensor]


def check_bounds(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, queries: Named, keys: Named) -> None:
    """What the boundaries hold is looked at on a CPU only: a GPU would have to be waited for."""
    if cu_seqlens_q.device.type == "cpu":
        sequence_ranges(cu_seqlens_q, cu_seqlens_k, queries, keys)


def sequence_ranges(
    cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, queries: Named, keys: Named
) -> Iterator[tuple[int, int, int, int]]:
    """(first query, end, first key, end) of each sequence, in the rows of `queries` and `keys`."""
    q, k = boundaries("cu_seqlens_q", cu_seqlens_q, queries), boundaries("cu_seqlens_k", cu_seqlens_k, keys)
    return zip(q, q[1:], k, k[1:])


def boundaries(name: str, x: torch.Tensor, rows: Named) -> list[int]:
    """The numbers of `x`. ValueError unless they ascend from 0 to the number of `rows`."""
    numbers, end = x.tolist(), len(rows[1])
    if not numbers or numbers[0] != 0 or numbers[-1] != end or numbers != sorted(numbers):
        raise ValueError(f"{name}: must ascend from 0 to {end}, got {numbers} (sizes as of {rows[0]})")
    return numbers
