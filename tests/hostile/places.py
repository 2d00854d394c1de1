"""What several modules of hostile contents share: small tensors, and what a wrong number does not concern."""

from collections.abc import Callable, Iterable, Sequence

import torch

from tests.hostile import Results

# Integer types of arguments that take both.
BOTH = {"int32": torch.int32, "int64": torch.int64}


def int32(values: Sequence, device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def randn(*shape: int, device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype).to(device)


def rows_but(rows: Iterable[int]) -> Callable[[Results], Results]:
    """All rows of all results but these."""
    wrong = list(rows)

    def rest(results: Results) -> Results:
        return [x[[i for i in range(len(x)) if i not in wrong]] for x in results]

    return rest


def places(count: int, rest: Callable[[int], Callable[[Results], Results]], column: int | None = None) -> dict:
    """The first number, one in the middle and the last, of a vector or of a matrix's column."""
    return {
        name: (i if column is None else (i, column), rest(i))
        for name, i in (("first", 0), ("middle", count // 2), ("last", count - 1))
    }


def own_row(count: int, column: int | None = None) -> dict:
    """Where a wrong number concerns the row of its number alone."""
    return places(count, lambda i: rows_but([i]), column)
