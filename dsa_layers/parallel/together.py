"""What ranks do together: all of them get through it, or all raise."""

import contextlib
import os
from collections.abc import Iterator

import torch.distributed as dist

from dsa_layers.parallel.ranks import Ranks

# Environment variables that must be the same on all ranks: which kernels run, and so how ranks communicate.
SETTINGS = ("DSA_BACKEND",)


@contextlib.contextmanager
def together(ranks: Ranks, error: type[ValueError] = ValueError) -> Iterator[dict[str, str]]:
    """What one rank raises within all raise: itself its own, a RuntimeError, MemoryError or OSError as an `error`, so
    that all end alike, and the others an `error` that names it. Gives a dictionary for facts by their names, in which
    the environment's SETTINGS are; an `error` for the first that ranks have otherwise than the first rank.

    Ranks that are alone, or of which no process group tells, have nobody to ask.
    """
    facts: dict[str, str] = {}
    if ranks.size == 1 or not dist.is_initialized():
        yield facts
        return
    facts |= {name: os.environ.get(name) or "unset" for name in SETTINGS}
    caught: Exception | None = None
    try:
        yield facts
    except Exception as problem:
        caught = problem
    said = None if caught is None else str(caught) or type(caught).__name__
    of_ranks: list[tuple[str | None, dict[str, str]]] = [(None, {})] * ranks.size
    dist.all_gather_object(of_ranks, (said, facts), group=ranks.group)
    if caught is not None:
        try:
            if isinstance(caught, RuntimeError | MemoryError | OSError):
                raise error(said) from caught
            raise caught
        finally:
            del caught  # this frame is one of its own: neither would go, nor the tensors of the others
    for rank, (problem, _) in enumerate(of_ranks):
        if problem is not None:
            raise error(f"{problem} (rank {rank})")
    for rank, (_, found) in enumerate(of_ranks):
        for name, value in found.items():
            first = of_ranks[0][1][name]
            if value != first:
                raise error(f"{name}: must be the same on all ranks, got {first} on rank 0 and {value} on rank {rank}")
