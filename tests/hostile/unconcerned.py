"""What of an op's results a wrong number does not concern."""

from collections.abc import Callable, Iterable, Sequence

import torch

from tests.hostile import Results


def nothing(results: Results) -> Results:
    return ()


def everything(results: Results) -> Results:
    return results


def rows(*kept: tuple[int, Iterable[int]] | None) -> Callable[[Results], Results]:
    """Of each result: along which dimension which rows; or None: nothing of it."""

    def rest(results: Results) -> Results:
        assert len(results) == len(kept)
        return [
            x.index_select(choice[0], torch.tensor(list(choice[1]), dtype=torch.long, device=x.device))
            for x, choice in zip(results, kept)
            if choice is not None
        ]

    return rest


def others(count: int, *concerned: int) -> list[int]:
    """Of 0 to count - 1 those that are not concerned."""
    return [i for i in range(count) if i not in concerned]


def rows_of(bounds: Sequence[int], sequences: Iterable[int]) -> list[int]:
    """The rows of packed sequences, which begin at `bounds`."""
    return [row for s in sequences for row in range(bounds[s], bounds[s + 1])]
