"""torch's symmetric memory: memory of each GPU of a machine that all other GPUs can write to."""

import os
import socket
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Made = TypeVar("Made")


@dataclass(frozen=True)
class SharedMemory:
    """Memory that the ranks of a group share.

    own     this rank's memory
    of      the memory of every rank, which this rank can access
    handle  torch's handle, which also has flags
    """

    own: torch.Tensor
    of: list[torch.Tensor]
    handle: Any

    def flag(self, rank: int, number: int) -> int:
        """Return the address of this rank's int32 flag `number` in the memory of `rank`."""
        return self.handle.signal_pad_ptrs[rank] + 4 * (number * len(self.of) + self.handle.rank)

    def await_flag(self, rank: int, number: int) -> None:
        """Make the current stream wait until `rank` has set its flag `number` in this rank's memory to 1, and then
        reset the flag to 0. The wait has no time limit."""
        self.handle.wait_signal(rank, number)


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate memory that ranks can share. Its contents are undefined. Raise torch's errors unchanged."""
    from torch.distributed import _symmetric_memory

    return _symmetric_memory.empty(shape, dtype=dtype, device=device)


def share(group: dist.ProcessGroup, memory: torch.Tensor) -> SharedMemory:
    """Share memory that all ranks of a group have allocated with the same arguments. All ranks must call this function
    together. Raise RuntimeError if `memory` is a part of a larger allocation. Raise torch's errors if GPUs cannot write
    to each other's memory."""
    from torch.distributed import _symmetric_memory

    handle = _symmetric_memory.rendezvous(memory, group)
    of = [handle.get_buffer(rank, memory.shape, memory.dtype) for rank in range(dist.get_world_size(group))]
    if of[dist.get_rank(group)].data_ptr() != memory.data_ptr():
        raise RuntimeError("the symmetric memory is a part of a larger one")
    return SharedMemory(memory, of, handle)


def made_by_all(
    group: dist.ProcessGroup,
    device: torch.device,
    what: str,
    memory: Callable[[], torch.Tensor],
    make: Callable[[torch.Tensor], Made],
    problem: str | None = None,
) -> Made | None:
    """Return make(memory()) on every rank of a group, or None on all ranks. All ranks must call this function together.

    The result is None without NCCL, and for ranks on several machines. If a rank has a `problem`, or if `memory` or
    `make` raises on a rank, the result is None and all ranks warn. A rank calls `make` after all ranks have allocated
    their memory.

    what     the first words of the warning: its subject and verb
    problem  why this rank cannot use symmetric memory, or None
    """
    # A group may have one backend per device type.
    if "cuda:nccl" not in dist.get_backend_config(group).split(",") or not _on_one_machine(group):
        return None
    # This module needs no NVLink multicast objects, and their creation may hang.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    made, fault = None, problem
    try:
        own = memory()
    except Exception as error:  # catch any error, because the other ranks wait for this rank's vote
        fault = fault or error
    if _all(fault is None, group, device):
        try:
            made = make(own)
        except Exception as error:
            fault = error
        if _all(made is not None, group, device):
            return made
    warnings.warn(
        f"{what} through NCCL, not through symmetric memory: {fault or 'another rank has none'}", stacklevel=3
    )
    return None


def meet(group: dist.ProcessGroup, device: torch.device) -> None:
    """Make the host wait until all ranks of a group and their GPUs have reached this call."""
    _all(True, group, device)


def _on_one_machine(group: dist.ProcessGroup) -> bool:
    hosts: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(hosts, socket.gethostname(), group=group)
    return len({*hosts}) == 1


def _all(yes: bool, group: dist.ProcessGroup, device: torch.device) -> bool:
    votes = torch.tensor(yes, dtype=torch.int32, device=device)
    dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=group)
    return bool(votes.item())
