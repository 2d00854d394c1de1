"""This process as one of the ranks that torchrun, or `launch`, has started."""

import os
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from dsa_layers.parallel.ranks import Ranks

Value = TypeVar("Value")
NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE")  # what torchrun tells of a rank


def started_ranks() -> int:
    """How many ranks were started together with this process; 1 where it was not started as a rank."""
    if any(name not in os.environ for name in NUMBERS):
        return 1
    try:
        return int(os.environ["WORLD_SIZE"])
    except ValueError:
        raise ValueError(f"WORLD_SIZE: must be a number of ranks, got {os.environ['WORLD_SIZE']!r}") from None


def join(device: str) -> tuple[Ranks, torch.device]:
    """This rank, once all ranks are there, and its device: of "cuda" the GPU of its number on this node, with NCCL
    between the ranks; of "cpu" the CPU, with gloo. ValueError for a GPU that is not there."""
    local = int(os.environ["LOCAL_RANK"])
    if device == "cpu":
        dist.init_process_group("gloo")
        return Ranks.of(), torch.device("cpu")
    if local >= torch.cuda.device_count():
        raise ValueError(f"gpus: rank {local} needs a GPU of its own, and torch sees {torch.cuda.device_count()}")
    if not dist.is_nccl_available():
        raise ValueError("gpus: several need NCCL, which this build of torch does not have")
    own = torch.device("cuda", local)
    torch.cuda.set_device(own)
    dist.init_process_group("nccl", device_id=own)
    return Ranks.of(), own


def agreed(ranks: Ranks, make: Callable[[], Value]) -> Value:
    """What the first rank makes, on all ranks; and where that is an error, which it raises, they raise it too."""
    made: list[tuple[Value | None, Exception | None]] = [(None, None)]
    if ranks.rank == 0:
        try:
            made = [(make(), None)]
        except Exception as error:
            made = [(None, error)]
    dist.broadcast_object_list(made, group=ranks.group, group_src=0)
    value, error = made[0]
    if error is not None:
        raise error
    return value
