"""Places in cu_seqlens of packed sequences, for tests/hostile/mla.py."""

from collections.abc import Sequence

import torch

from tests.hostile.unconcerned import others, rows, rows_of

BF16 = torch.bfloat16
# Of each packed sequence: one longer than a tile of 128 queries, one without queries, one whose first queries see none.
QUERIES, KEYS = (130, 0, 7, 5), (140, 4, 3, 70)
BOUNDS = ("cu_seqlens_q", "cu_seqlens_k")


def starts(lengths: Sequence[int]) -> list[int]:
    return [0, *torch.tensor(lengths).cumsum(0).tolist()]


def packed_places(of_queries: Sequence, of_keys: Sequence) -> dict:
    """Every number of cu_seqlens with the rows of the sequences that it is not between. of_queries, of_keys: of each
    result the dimension of its queries or keys, None where it has none; one of both."""
    bounds_q, bounds_k = starts(QUERIES), starts(KEYS)
    places = {}
    for i in range(len(QUERIES) + 1):
        rest = others(len(QUERIES), i - 1, i)
        kept = [
            (dim_q, rows_of(bounds_q, rest)) if dim_q is not None else (dim_k, rows_of(bounds_k, rest))
            for dim_q, dim_k in zip(of_queries, of_keys)
        ]
        places[f"number {i}"] = (i, rows(*kept))
    return places
