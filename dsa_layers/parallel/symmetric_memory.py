"""Memory of each GPU of a machine that all the others can write to: torch's symmetric memory."""

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
    """own: this rank's; of: every rank's, in their order; handle: torch's, with flags beside the memory."""

    own: torch.Tensor
    of: list[torch.Tensor]
    handle: Any

    def flag(self, rank: int, number: int) -> int:
        """The address of this rank's flag of a number at another rank, an int32."""
        return self.handle.signal_pad_ptrs[rank] + 4 * (number * len(self.of) + self.handle.rank)

    def await_flag(self, rank: int, number: int) -> None:
        """The current stream waits until another rank's is 1 here, without an end, and makes it 0."""
        self.handle.wait_signal(rank, number)


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory that can be shared, filled with anything. Where there is none it raises what torch raises."""
    from torch.distributed import _symmetric_memory

    return _symmetric_memory.empty(shape, dtype=dtype, device=device)


def share(group: dist.ProcessGroup, memory: torch.Tensor) -> SharedMemory:
    """What all ranks of a group have allocated alike, which all ask for at the same time. RuntimeError where it is not
    memory of its own, and whatever torch raises where GPUs cannot write to each other's."""
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
    """make(memory()) on every rank of a group, all of which ask for it at the same time, or None on all: without NCCL,
    on several machines, and with a warning where a rank has a problem or finds one. `make` begins when all have their
    memory."""
    # A group of several kinds of devices has a backend for each.
    if "cuda:nccl" not in dist.get_backend_config(group).split(",") or not _on_one_machine(group):
        return None
    # Multicast objects of NVLink are not used here, and to make them may hang.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    made, fault = None, problem
    try:
        own = memory()
    except Exception as error:  # whatever it is, the others are not to wait
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
    """The host waits until all ranks of a group are here, and their GPUs."""
    _all(True, group, device)


def _on_one_machine(group: dist.ProcessGroup) -> bool:
    hosts: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(hosts, socket.gethostname(), group=group)
    return len({*hosts}) == 1


def _all(yes: bool, group: dist.ProcessGroup, device: torch.device) -> bool:
    votes = torch.tensor(yes, dtype=torch.int32, device=device)
    dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=group)
    return bool(votes.item())
