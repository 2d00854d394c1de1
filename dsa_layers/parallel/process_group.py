"""Join the process group of ranks that torchrun or `launch` has started, and exchange small values between ranks."""

import atexit
import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dsa_layers.parallel.ranks import Ranks

Value = TypeVar("Value")
# How long a rank waits for the other ranks. The time is long, because another rank may be reading large files or
# compiling. If a rank fails, the launcher ends the other ranks, so they do not wait for the timeout.
TIMEOUT = timedelta(hours=2)


def join(device: str) -> tuple[Ranks, torch.device]:
    """Join the process group, which waits for all ranks. Return this rank and its device.

    device  "cuda": the GPU whose index is LOCAL_RANK, with NCCL; "cpu": the CPU, with gloo. It must be the same on all
            ranks

    Raise ValueError if the GPU is missing.

    The NCCL group is never destroyed explicitly, because destroying it would wait for CUDA graphs that contain its
    collectives."""
    if device == "cpu":
        dist.init_process_group("gloo", timeout=TIMEOUT)
        # A gloo thread that needs the Python interpreter during its shutdown would abort the process.
        atexit.register(_leave)
        return Ranks.of(), torch.device("cpu")
    local = int(os.environ["LOCAL_RANK"])
    if local >= torch.cuda.device_count():
        raise ValueError(f"gpus: rank {local} needs a GPU of its own, and torch sees {torch.cuda.device_count()}")
    own = torch.device("cuda", local)
    torch.cuda.set_device(own)
    dist.init_process_group("nccl", device_id=own, timeout=TIMEOUT)
    return Ranks.of(), own


def _leave() -> None:
    """Destroy the group. Its threads end when its last reference is dropped. Frames of an exception may hold a
    reference, so run the garbage collector too."""
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()


def gathered(ranks: Ranks, value: Value) -> list[Value]:
    """Return every rank's `value`, in the order of the ranks. Without a process group, return [value]."""
    if ranks.size == 1 or not dist.is_initialized():
        return [value]
    values = [value] * ranks.size
    dist.all_gather_object(values, value, group=ranks.group)
    return values


def agreed(ranks: Ranks, make: Callable[[], Value]) -> Value:
    """Call `make` on rank 0, and return its result on all ranks. If `make` raises an error, all ranks raise it."""
    with raise_on_all_ranks(ranks):
        made = make() if ranks.rank == 0 else None
    return gathered(ranks, made)[0]


@contextlib.contextmanager
def raise_on_all_ranks(ranks: Ranks, error: type[ValueError] = ValueError) -> Iterator[dict[str, Any]]:
    """If one rank raises an exception in this context, raise an exception on all ranks. The failed rank raises its own
    exception, and the other ranks raise an `error` that names the failed rank. The failed rank converts a RuntimeError,
    MemoryError or OSError to an `error`, so that all ranks end in the same way.

    The context yields a dictionary of facts. It contains DSA_BACKEND, which chooses the kernels, and the caller adds
    further facts. If a fact is not equal on all ranks, all ranks raise an `error` that names the fact. With one rank or
    without a process group, nothing is exchanged.
    """
    facts: dict[str, Any] = {"DSA_BACKEND": os.environ.get("DSA_BACKEND") or "unset"}
    if ranks.size == 1 or not dist.is_initialized():
        yield facts
        return
    try:
        yield facts
    except Exception as problem:
        said = str(problem) or type(problem).__name__
        gathered(ranks, (said, facts))
        if isinstance(problem, RuntimeError | MemoryError | OSError):
            raise error(said) from problem
        raise
    of_ranks = gathered(ranks, (None, facts))
    problems = [f"{problem} (rank {rank})" for rank, (problem, _) in enumerate(of_ranks) if problem is not None]
    first = of_ranks[0][1]
    problems += [
        f"{name}: must be the same on all ranks, got {first.get(name)} on rank 0 and {value} on rank {rank}"
        for rank, (_, found) in enumerate(of_ranks)
        for name, value in found.items()
        if value != first.get(name)
    ]
    if problems:
        raise error(problems[0])
