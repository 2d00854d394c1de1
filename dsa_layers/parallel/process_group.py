"""This process as one of the ranks that torchrun, or `launch`, has started."""

import atexit
import gc
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dsa_layers.parallel.ranks import Ranks

Value = TypeVar("Value")
# Of the wait for other ranks: they read their parts of large files, and compile. Those of a rank that ends are ended.
TIMEOUT = timedelta(hours=2)


def join(device: str) -> tuple[Ranks, torch.device]:
    """This rank, once all ranks are there, and its device: of "cuda" the GPU of its number on this node, with NCCL
    between the ranks; of "cpu" the CPU, with gloo. ValueError for a GPU that is not there, and for another `device`
    than the first rank's. NCCL's group is left to the process's end: it would wait for CUDA graphs that hold its
    collectives."""
    local = int(os.environ["LOCAL_RANK"])
    if device == "cpu":
        dist.init_process_group("gloo", **_meeting_place(device))
        # A thread of gloo that still asks for the interpreter while that ends, however it ends, aborts the process.
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
    """How `init_process_group` finds the other ranks. Gloo and NCCL would wait for each other."""
    store, rank, size = next(dist.rendezvous("env://", timeout=TIMEOUT))
    store.set(f"device of rank {rank}", device)
    first = store.get("device of rank 0").decode()
    if device != first:
        raise ValueError(f"device: must be the same on all ranks, got {first} on rank 0 and {device} on rank {rank}")
    return {"store": dist.PrefixStore("ranks", store), "rank": rank, "world_size": size, "timeout": TIMEOUT}


def _leave() -> None:
    """Its threads end with the last reference to the group, and an exception's frames may hold some in a cycle."""
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()


def least(ranks: Ranks, value: int) -> int:
    """The least of the ranks' values. Ranks that are alone, or of which no process group tells, have nobody to ask."""
    if ranks.size == 1 or not dist.is_initialized():
        return value
    values = [value] * ranks.size
    dist.all_gather_object(values, value, group=ranks.group)
    return min(values)


def agreed(ranks: Ranks, make: Callable[[], Value]) -> Value:
    """What the first rank makes, on all ranks; and where that is a ValueError, which it raises, they raise it too."""
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
