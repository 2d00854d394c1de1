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
    """own: this rank's memory; of: the memory of every rank; handle: torch's handle, which has flags too."""

    own: torch.Tensor
    of: list[torch.Tensor]
    handle: Any

    def flag(self, rank: int, number: int) -> int:
        """The address of this rank's int32 flag with a number, in another rank's memory."""
        return self.handle.signal_pad_ptrs[rank] + 4 * (number * len(self.of) + self.handle.rank)

    def await_flag(self, rank: int, number: int) -> None:
        """Make the current stream wait until `rank` has set its flag `number` in this rank's memory to 1, and then
        reset the flag to 0. The wait has no time limit."""
        self.handle.wait_signal(rank, number)


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate memory that can be shared. Its contents are undefined. Raises torch's errors."""
    from torch.distributed import _symmetric_memory

    return _symmetric_memory.empty(shape, dtype=dtype, device=device)


def share(group: dist.ProcessGroup, memory: torch.Tensor) -> SharedMemory:
    """Share memory that all ranks of a group have allocated in the same way; all call this together. Raises
    RuntimeError for a part of a larger memory, and torch's errors if GPUs cannot write to each other's memory."""
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
    """Return make(memory()) on every rank of a group, or None on all ranks. All ranks call this together.

    The result is None without NCCL, and for ranks on several machines. If a rank has a `problem`, or if `memory` or
    `make` raises on a rank, the result is None with a warning. A rank calls `make` after all ranks have their memory.
    what: the subject of the warning
    """
    # A group may have a backend for each kind of device.
    if "cuda:nccl" not in dist.get_backend_config(group).split(",") or not _on_one_machine(group):
        return None
    # Creating NVLink multicast objects may hang, and they are not used here.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    made, fault = None, problem
    try:
        own = memory()
    except Exception as error:  # any error: the other ranks must not wait
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
    """Make the host wait until all ranks of a group and their GPUs have come here."""
    _all(True, group, device)


def _on_one_machine(group: dist.ProcessGroup) -> bool:
    hosts: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(hosts, socket.gethostname(), group=group)
    return len({*hosts}) == 1


def _all(yes: bool, group: dist.ProcessGroup, device: torch.device) -> bool:
    votes = torch.tensor(yes, dtype=torch.int32, device=device)
    dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=group)
    return bool(votes.item())
