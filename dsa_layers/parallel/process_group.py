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
# Environment variables that must be equal on all ranks. They choose the kernels, and so how ranks communicate.
SETTINGS = ("DSA_BACKEND",)


def join(device: str) -> tuple[Ranks, torch.device]:
    """Join the process group, which waits for all ranks. Return this rank and its device.

    device  "cuda": the GPU whose index is LOCAL_RANK, with NCCL; "cpu": the CPU, with gloo

    Raise ValueError if the GPU or NCCL is missing, or if `device` differs from rank 0's.

    The NCCL group is never destroyed explicitly, because destroying it would wait for CUDA graphs that contain its
    collectives."""
    local = int(os.environ["LOCAL_RANK"])
    if device == "cpu":
        dist.init_process_group("gloo", **_meeting_place(device))
        # A gloo thread that needs the Python interpreter during its shutdown would abort the process.
        atexit.register(_leave)
        return Ranks.of(), torch.device("cpu")
    if local >= torch.cuda.device_count():
        raise ValueError(f"gpus: rank {local} needs a GPU of its own, and torch sees {torch.cuda.device_count()}")
    if not dist.is_nccl_available():
        raise ValueError("gpus: several need NCCL, which this build of torch does not have")
    own = torch.device("cuda", local)
    torch.cuda.set_device(own)
    dist.init_process_group("nccl", device_id=own, **_meeting_place(device))
    return Ranks.of(), own


def _meeting_place(device: str) -> dict[str, Any]:
    """Return the arguments with which `init_process_group` finds the other ranks. Raise ValueError if `device` differs
    from rank 0's: a rank with gloo and a rank with NCCL would wait for each other indefinitely."""
    store, rank, size = next(dist.rendezvous("env://", timeout=TIMEOUT))
    store.set(f"device of rank {rank}", device)
    first = store.get("device of rank 0").decode()
    if device != first:
        raise ValueError(f"device: must be the same on all ranks, got {first} on rank 0 and {device} on rank {rank}")
    return {"store": dist.PrefixStore("ranks", store), "rank": rank, "world_size": size, "timeout": TIMEOUT}


def _leave() -> None:
    """Destroy the group. Its threads end when its last reference is dropped. Frames of an exception may hold a
    reference, so run the garbage collector too."""
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()


def least(ranks: Ranks, value: int) -> int:
    """Return the minimum of `value` over the ranks. With one rank or without a process group, return `value`."""
    if ranks.size == 1 or not dist.is_initialized():
        return value
    values = [value] * ranks.size
    dist.all_gather_object(values, value, group=ranks.group)
    return min(values)


def agreed(ranks: Ranks, make: Callable[[], Value]) -> Value:
    """Call `make` on rank 0, and return its result on all ranks. If `make` raises ValueError, all ranks raise it."""
    made: list[tuple[Value | None, str | None]] = [(None, None)]
    if ranks.rank == 0:
        try:
            made = [(make(), None)]
        except ValueError as error:
            made = [(None, str(error))]
    dist.broadcast_object_list(made, group=ranks.group, group_src=0)
    value, problem = made[0]
    if problem is not None:
        raise ValueError(problem)
    return value


@contextlib.contextmanager
def raise_on_all_ranks(ranks: Ranks, error: type[ValueError] = ValueError) -> Iterator[dict[str, Any]]:
    """Raise on all ranks if one rank raises inside this context, which all ranks must enter. The failed rank raises its
    exception, and the other ranks raise an `error` that names the failed rank. The failed rank converts a RuntimeError,
    MemoryError or OSError to an `error`, so that all ranks end in the same way.

    The context yields a dictionary of facts. It contains SETTINGS, and the caller adds further facts. If a fact is not
    equal on all ranks, all ranks raise an `error` that names the fact. With one rank or without a process group,
    nothing is exchanged.
    """
    facts: dict[str, Any] = {}
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
    of_ranks: list[tuple[str | None, dict[str, Any]]] = [(None, {})] * ranks.size
    dist.all_gather_object(of_ranks, (said, facts), group=ranks.group)
    if caught is not None:
        try:
            if isinstance(caught, RuntimeError | MemoryError | OSError):
                raise error(said) from caught
            raise caught
        finally:
            del caught  # the exception refers to this frame, and so would keep the tensors of all frames alive
    for rank, (problem, _) in enumerate(of_ranks):
        if problem is not None:
            raise error(f"{problem} (rank {rank})")
    for rank, (_, found) in enumerate(of_ranks):
        for name, value in found.items():
            first = of_ranks[0][1][name]
            if value != first:
                raise error(f"{name}: must be the same on all ranks, got {first} on rank 0 and {value} on rank {rank}")
