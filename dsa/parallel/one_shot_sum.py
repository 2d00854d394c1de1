"""All-reduce of small tensors over the GPUs of a machine in one kernel. Each GPU writes its summand to all GPUs."""

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist

from dsa.kernels.moe.limits import CHANNEL_MULTIPLE
from dsa.kernels.parallel.limits import DTYPES, HALVES, PART, RANKS
from dsa.parallel.symmetric_memory import allocate, made_by_all, share
from dsa.runtime import backends

FEW = 128 << 10  # the largest result, in bytes, for which the kernel also sums the experts of each token
MEMORY = 32 << 20  # bytes per GPU of the buffers for two sums' parts from all GPUs; a part takes twice its size
PATIENCE = 120 * 10**9  # cycles for which a sum waits for a rank: a minute at 2 GHz
_DTYPES = {getattr(torch, name): name for name in DTYPES}


def takes(x: torch.Tensor, ranks: int) -> bool:
    """Return whether the kernel supports this contiguous part: a multiple of 16 bytes, at most `most_bytes`."""
    aligned = x.nbytes % 16 == x.data_ptr() % 16 == 0
    return _has_kernel(x, ranks) and aligned and 0 < x.nbytes <= most_bytes(ranks)


def takes_experts(
    y: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor | None, shared: torch.Tensor | None, ranks: int
) -> bool:
    """Return whether the kernel supports these arguments of `dsa.combine_experts`; the result must be small (FEW)."""
    if weights is None or weights.dtype != torch.float32 or rows.dtype != torch.int32 or not len(y):
        return False
    size = len(rows), y.shape[1]
    if weights.shape != rows.shape or (shared is not None and (shared.dtype, *shared.shape) != (y.dtype, *size)):
        return False
    read = [y] if shared is None else [y, shared]
    rows_fit = all(x.stride(1) == 1 and x.stride(0) * x.itemsize % 16 == x.data_ptr() % 16 == 0 for x in read)
    few = 0 < len(rows) * y.shape[1] * y.itemsize <= min(FEW, most_bytes(ranks))
    whole = y.shape[1] % CHANNEL_MULTIPLE == 0
    return _has_kernel(y, ranks) and rows_fit and few and whole and not torch.is_grad_enabled()


def _has_kernel(x: torch.Tensor, ranks: int) -> bool:
    return x.is_cuda and x.dtype in _DTYPES and ranks in RANKS and backends.allows_kernels()


def most_bytes(ranks: int) -> int:
    """Return the size of the largest part in bytes: 4 MiB for two GPUs, 1 MiB for eight."""
    return PART * _places(ranks)


def compiled_sums(ranks: int) -> dict[tuple, Callable[..., None]]:
    """Compile all kernels for this number of ranks. Key (dtype,) is the kernel that sums parts. Key (dtype, whether
    there is a shared expert) is the kernel that also sums experts."""
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
    """Return the flag that kernels set if they stop waiting for a rank: they write 1 + the rank; before, it is 0. The
    flag is in pinned memory, so the host reads it without a synchronisation."""
    return torch.zeros(1, dtype=torch.int32, pin_memory=torch.cuda.is_available())


def check_ranks() -> None:
    """Raise RuntimeError if a sum of this process has stopped waiting for a rank. Do not wait for the GPU."""
    if lost := int(_lost()):
        raise RuntimeError(
            f"sums over GPUs: rank {lost - 1} sent nothing for about a minute, so results are undefined since; end all "
            "ranks and start them again"
        )


class OneShotSum:
    """All-reduce kernels of one group: x_0 + x_1 + ..., added in fp32 in the order of the ranks and rounded once.

    The ranks exchange their summands in torch's symmetric memory. The kernels are in dsa.kernels.parallel, and a CUDA
    graph may contain them. A kernel waits about a minute (PATIENCE) for the other ranks' summands. After that the
    results are undefined, later sums do not wait, and every later call raises RuntimeError (`check_ranks`). All ranks
    must compute the same sums in the same order, one at a time.
    """

    def __init__(self, group: dist.ProcessGroup, memory: torch.Tensor) -> None:
        from dsa.kernels.parallel.one_shot_sum_sm90 import choose_ctas

        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._memory = share(group, memory)
        self._turns = torch.zeros(3, dtype=torch.int32, device=memory.device)
        self._choose_ctas = functools.partial(choose_ctas, sms=backends.num_sms(memory.device))
        self._kernels = compiled_sums(self._ranks)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' x. `takes` must accept x."""
        y = torch.empty_like(x)
        self._sum(self._kernels[(x.dtype,)], (x.view(-1),), y)
        return y

    def of_experts(
        self, y: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the sum of the ranks' `dsa.combine_experts` results. `takes_experts` must accept the arguments."""
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
    """Return the all-reduce of a group, which the first call creates. All ranks must make the first call together, and
    not during the capture of a CUDA graph. Return None without NCCL, on several machines, if a rank has no kernels, or
    if GPUs cannot write to each other's memory."""
    ranks = dist.get_world_size(group)

    def memory() -> torch.Tensor:
        # Zero the memory before the ranks vote in `made_by_all`, and so before any part arrives.
        return allocate((HALVES, ranks, _places(ranks), 4), torch.int32, device).zero_()

    problem = backends.why_no_kernels()
    return made_by_all(group, device, "sums go", memory, lambda memory: OneShotSum(group, memory), problem)


def _places(ranks: int) -> int:
    """Return the largest number of PART-byte pieces in a part, so that all parts fit into MEMORY."""
    return MEMORY // (HALVES * ranks * 2 * PART)
