"""Sums of little over the GPUs of a machine: each writes its part into the memory of all, in one kernel."""

import functools
import os
import socket
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist

from dsa import backends
from dsa.kernels.parallel.limits import DTYPES, HALVES, PART, RANKS
from dsa.ops.declaration import Kernels

KERNELS = Kernels("sums over GPUs", {"sm_90": "dsa.kernels.parallel.one_shot_sum_sm90"})
MEMORY = 32 << 20  # bytes of each GPU, in which parts have twice their size, from all GPUs and of two sums
_DTYPES = {getattr(torch, name): name for name in DTYPES}


def takes(x: torch.Tensor, ranks: int) -> bool:
    """Whether so many ranks may sum such parts, which are contiguous: little, and 16 bytes at a time."""
    known = x.is_cuda and x.dtype in _DTYPES and ranks in RANKS and backends.allows_kernels()
    return known and x.nbytes % 16 == 0 and x.data_ptr() % 16 == 0 and 0 < x.nbytes <= most_bytes(ranks)


def most_bytes(ranks: int) -> int:
    """Of a part: 4 MiB for two GPUs, 1 MiB for eight."""
    return PART * _places(ranks)


def compiled_sums(arch: str, ranks: int) -> dict[torch.dtype, Callable[..., None]]:
    """The kernels that so many ranks sum with: of each dtype, whichever comes first."""
    kernels = KERNELS.modules(arch)
    return {dtype: kernels.compile_one_shot_sum(name, ranks) for dtype, name in _DTYPES.items()}


class OneShotSum:
    """x_0 + x_1 + ... of the ranks' x, in fp32 and in the order of the ranks, rounded once.

    The memory that all can write to is torch's symmetric memory, the kernel dsa.kernels.parallel.one_shot_sum_sm90. A
    CUDA graph may hold it. It waits for the parts of all others, without an end. All ranks make the same sums in the
    same order, one at a time.
    """

    def __init__(self, group: dist.ProcessGroup, memory: torch.Tensor) -> None:
        from torch.distributed import _symmetric_memory

        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._handle = _symmetric_memory.rendezvous(memory, group)
        buffers = (self._handle.get_buffer(rank, memory.shape, memory.dtype) for rank in range(self._ranks))
        self._memory, self._memories = memory, list(buffers)
        if self._memories[self._rank].data_ptr() != memory.data_ptr():
            raise RuntimeError("the symmetric memory is a part of a larger one")
        self._turns = torch.zeros(2, dtype=torch.int32, device=memory.device)
        arch, sms = backends.arch_of(memory.device), backends.num_sms(memory.device)
        self._choose_ctas = functools.partial(KERNELS.modules(arch).choose_ctas, sms=sms)
        self._kernels = compiled_sums(arch, self._ranks)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: what it `takes`."""
        y = torch.empty_like(x)
        with backends.on_device(x):
            self._kernels[x.dtype](
                *(x.view(-1), y.view(-1), self._memory, self._memories, self._turns),
                *(self._rank, self._choose_ctas(x.nbytes // PART)),
            )
        return y


@functools.cache
def one_shot_sum(group: dist.ProcessGroup, device: torch.device) -> OneShotSum | None:
    """That of a group of ranks, all of which ask for it at the same time, the first time before a CUDA graph; None
    where there is none: without NCCL, on several machines, without kernels on a rank, and of GPUs that cannot write to
    each other's memory."""
    # A group of several kinds of devices has a backend for each.
    if "cuda:nccl" not in dist.get_backend_config(group).split(",") or not _on_one_machine(group):
        return None
    # Multicast objects of NVLink are not used here, and to make them may hang.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    ranks, made = dist.get_world_size(group), None
    problem: str | Exception | None = backends.why_no_kernels()
    try:
        from torch.distributed import _symmetric_memory

        memory = _symmetric_memory.empty((HALVES, ranks, _places(ranks), 4), dtype=torch.int32, device=device)
        memory.zero_()  # before the ranks vote: no part comes before
    except Exception as error:  # whatever it is, the others are not to wait
        problem = problem or error
    if _all(problem is None, group, device):
        try:
            made = OneShotSum(group, memory)
        except Exception as error:
            problem = error
        if _all(made is not None, group, device):
            return made
    reason = problem or "another rank has none"
    warnings.warn(f"sums go through NCCL, not through symmetric memory: {reason}", stacklevel=2)
    return None


def _on_one_machine(group: dist.ProcessGroup) -> bool:
    hosts: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(hosts, socket.gethostname(), group=group)
    return len({*hosts}) == 1


def _places(ranks: int) -> int:
    """So many PART bytes of a part fit into MEMORY."""
    return MEMORY // (HALVES * ranks * 2 * PART)


def _all(yes: bool, group: dist.ProcessGroup, device: torch.device) -> bool:
    votes = torch.tensor(yes, dtype=torch.int32, device=device)
    dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=group)
    return bool(votes.item())
