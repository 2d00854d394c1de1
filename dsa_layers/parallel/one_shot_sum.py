"""Sums of little over the GPUs of a machine: each writes its part into the memory of all, in one kernel."""

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist

from dsa import backends
from dsa.kernels.parallel.limits import DTYPES, HALVES, PART, RANKS
from dsa.ops.declaration import Kernels
from dsa_layers.parallel.symmetric_memory import allocate, made_by_all, share

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
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._memory = share(group, memory)
        self._turns = torch.zeros(2, dtype=torch.int32, device=memory.device)
        arch, sms = backends.arch_of(memory.device), backends.num_sms(memory.device)
        self._choose_ctas = functools.partial(KERNELS.modules(arch).choose_ctas, sms=sms)
        self._kernels = compiled_sums(arch, self._ranks)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: what it `takes`."""
        y = torch.empty_like(x)
        with backends.on_device(x):
            self._kernels[x.dtype](
                *(x.view(-1), y.view(-1), self._memory.own, self._memory.of, self._turns),
                *(self._rank, self._choose_ctas(x.nbytes // PART)),
            )
        return y


@functools.cache
def one_shot_sum(group: dist.ProcessGroup, device: torch.device) -> OneShotSum | None:
    """That of a group of ranks, all of which ask for it at the same time, the first time before a CUDA graph; None
    where there is none: without NCCL, on several machines, without kernels on a rank, and of GPUs that cannot write to
    each other's memory."""
    ranks = dist.get_world_size(group)

    def memory() -> torch.Tensor:
        # Zero before the ranks vote: no part comes before.
        return allocate((HALVES, ranks, _places(ranks), 4), torch.int32, device).zero_()

    problem = backends.why_no_kernels()
    return made_by_all(group, device, "sums go", memory, lambda memory: OneShotSum(group, memory), problem)


def _places(ranks: int) -> int:
    """So many PART bytes of a part fit into MEMORY."""
    return MEMORY // (HALVES * ranks * 2 * PART)
