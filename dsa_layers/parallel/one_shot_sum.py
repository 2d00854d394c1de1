"""Sums of little over the GPUs of a machine: each writes its part into the memory of all, in one kernel."""

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist

from dsa.kernels.moe.limits import CHANNEL_MULTIPLE
from dsa.kernels.parallel.limits import DTYPES, HALVES, PART, RANKS
from dsa.runtime import backends
from dsa_layers.parallel.symmetric_memory import allocate, made_by_all, share

FEW = 128 << 10  # bytes of tokens up to which their experts are summed in the kernel of the sum over GPUs
MEMORY = 32 << 20  # bytes of each GPU, in which parts have twice their size, from all GPUs and of two sums
PATIENCE = 120 * 10**9  # cycles that a sum waits for a rank: a minute at 2 GHz
_DTYPES = {getattr(torch, name): name for name in DTYPES}


def takes(x: torch.Tensor, ranks: int) -> bool:
    """Whether so many ranks may sum such parts, which are contiguous: little, and 16 bytes at a time."""
    known = x.is_cuda and x.dtype in _DTYPES and ranks in RANKS and backends.allows_kernels()
    return known and x.nbytes % 16 == 0 and x.data_ptr() % 16 == 0 and 0 < x.nbytes <= most_bytes(ranks)


def takes_experts(
    y: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor | None, shared: torch.Tensor | None, ranks: int
) -> bool:
    """Whether so many ranks may sum these in one kernel: of few tokens, as `dsa.combine_experts` takes them."""
    if weights is None or weights.dtype != torch.float32 or rows.dtype != torch.int32 or not len(y):
        return False
    size = len(rows), y.shape[1]
    if weights.shape != rows.shape or (shared is not None and (shared.dtype, *shared.shape) != (y.dtype, *size)):
        return False
    read = [y] if shared is None else [y, shared]
    rows_fit = all(x.stride(1) == 1 and x.stride(0) * x.itemsize % 16 == x.data_ptr() % 16 == 0 for x in read)
    known = y.is_cuda and y.dtype in _DTYPES and ranks in RANKS and backends.allows_kernels()
    few = 0 < len(rows) * y.shape[1] * y.itemsize <= min(FEW, most_bytes(ranks))
    return known and rows_fit and few and y.shape[1] % CHANNEL_MULTIPLE == 0 and not torch.is_grad_enabled()


def most_bytes(ranks: int) -> int:
    """Of a part: 4 MiB for two GPUs, 1 MiB for eight."""
    return PART * _places(ranks)


def compiled_sums(ranks: int) -> dict[tuple, Callable[..., None]]:
    """All kernels that so many ranks sum with: (dtype,) sums parts, (dtype, with a shared expert) sums experts."""
    from dsa.kernels.parallel.experts_sum_sm90 import compile_experts_sum
    from dsa.kernels.parallel.one_shot_sum_sm90 import compile_one_shot_sum

    found: dict[tuple, Callable[..., None]] = {}
    for dtype, name in _DTYPES.items():
        found[(dtype,)] = compile_one_shot_sum(name, ranks)
        for shared in (False, True):
            found[dtype, shared] = compile_experts_sum(name, ranks, shared)
    return found


@functools.cache
def _lost() -> torch.Tensor:
    """This process's memory that kernels write to without a synchronisation: 1 + the rank that a sum has stopped
    waiting for, 0 if none has."""
    return torch.zeros(1, dtype=torch.int32, pin_memory=torch.cuda.is_available())


def check_ranks() -> None:
    """RuntimeError if a sum of this process has stopped waiting for a rank. Waits for no GPU."""
    if lost := int(_lost()):
        raise RuntimeError(
            f"sums over GPUs: rank {lost - 1} sent nothing for about a minute, so results are undefined since; end all "
            "ranks and start them again"
        )


class OneShotSum:
    """x_0 + x_1 + ... of the ranks' x, in fp32 and in the order of the ranks, rounded once.

    The memory that all can write to is torch's symmetric memory, the kernels are in dsa.kernels.parallel. A CUDA
    graph may hold them. They wait for the parts of all others for about a minute (PATIENCE). After that the results
    are undefined, later sums wait no more, and every later call raises RuntimeError (`check_ranks`). All ranks make
    the same sums in the same order, one at a time.
    """

    def __init__(self, group: dist.ProcessGroup, memory: torch.Tensor) -> None:
        from dsa.kernels.parallel.one_shot_sum_sm90 import choose_ctas

        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._memory = share(group, memory)
        self._turns = torch.zeros(3, dtype=torch.int32, device=memory.device)
        self._choose_ctas = functools.partial(choose_ctas, sms=backends.num_sms(memory.device))
        self._kernels = compiled_sums(self._ranks)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: what it `takes`."""
        y = torch.empty_like(x)
        self._sum(self._kernels[(x.dtype,)], (x.view(-1),), y)
        return y

    def of_experts(
        self, y: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None
    ) -> torch.Tensor:
        """The sum of the ranks' `dsa.combine_experts` of these, which it takes (`takes_experts`)."""
        out = y.new_empty(len(rows), y.shape[1])
        self._sum(self._kernels[y.dtype, shared is not None], (y, rows, weights, shared), out)
        return out

    def _sum(self, kernel: Callable[..., None], part: tuple[torch.Tensor | None, ...], out: torch.Tensor) -> None:
        check_ranks()
        with backends.on_device(out):
            kernel(
                *(*part, out.view(-1), self._memory.own, self._memory.of, self._turns),
                *(self._rank, self._choose_ctas(out.nbytes // PART), PATIENCE, _lost().data_ptr()),
            )


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
