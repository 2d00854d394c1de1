"""All-reduce of few bytes over the GPUs of a machine, in one kernel: each GPU writes its part to the memory of all."""

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist

from dsa.kernels.moe.limits import CHANNEL_MULTIPLE
from dsa.kernels.parallel.limits import DTYPES, HALVES, PART, RANKS
from dsa.runtime import backends
from dsa_layers.parallel.symmetric_memory import allocate, made_by_all, share

FEW = 128 << 10  # up to this many bytes of tokens, the kernel sums each token's experts too
MEMORY = 32 << 20  # bytes per GPU for the parts of two sums from all GPUs; a part takes twice its size
PATIENCE = 120 * 10**9  # cycles that a sum waits for a rank: a minute at 2 GHz
_DTYPES = {getattr(torch, name): name for name in DTYPES}


def takes(x: torch.Tensor, ranks: int) -> bool:
    """Whether the kernel takes these contiguous parts: few bytes, and a multiple of 16."""
    known = x.is_cuda and x.dtype in _DTYPES and ranks in RANKS and backends.allows_kernels()
    return known and x.nbytes % 16 == 0 and x.data_ptr() % 16 == 0 and 0 < x.nbytes <= most_bytes(ranks)


def takes_experts(
    y: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor | None, shared: torch.Tensor | None, ranks: int
) -> bool:
    """Whether the kernel takes these arguments of `dsa.combine_experts`: few tokens."""
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
    """The largest part: 4 MiB for two GPUs, 1 MiB for eight."""
    return PART * _places(ranks)


def compiled_sums(ranks: int) -> dict[tuple, Callable[..., None]]:
    """All kernels for this number of ranks: (dtype,) sums parts, (dtype, with a shared expert) sums experts."""
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
    """Pinned memory to which kernels write 1 + the rank that they have stopped waiting for; 0 if there is none. The
    host reads it without a synchronisation."""
    return torch.zeros(1, dtype=torch.int32, pin_memory=torch.cuda.is_available())


def check_ranks() -> None:
    """Raise RuntimeError if a sum of this process has stopped waiting for a rank. Does not wait for the GPU."""
    if lost := int(_lost()):
        raise RuntimeError(
            f"sums over GPUs: rank {lost - 1} sent nothing for about a minute, so results are undefined since; end all "
            "ranks and start them again"
        )


class OneShotSum:
    """x_0 + x_1 + ... of the ranks' x, in fp32 and in the order of the ranks, rounded once.

    The parts are in torch's symmetric memory, and the kernels in dsa.kernels.parallel. A CUDA graph may contain them. A
    kernel waits about a minute (PATIENCE) for the other ranks' parts. After that the results are undefined, later sums
    do not wait, and every later call raises RuntimeError (`check_ranks`). All ranks make the same sums in the same
    order, one at a time.
    """

    def __init__(self, group: dist.ProcessGroup, memory: torch.Tensor) -> None:
        from dsa.kernels.parallel.one_shot_sum_sm90 import choose_ctas

        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._memory = share(group, memory)
        self._turns = torch.zeros(3, dtype=torch.int32, device=memory.device)
        self._choose_ctas = functools.partial(choose_ctas, sms=backends.num_sms(memory.device))
        self._kernels = compiled_sums(self._ranks)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' x, for which `takes` is true."""
        y = torch.empty_like(x)
        self._sum(self._kernels[(x.dtype,)], (x.view(-1),), y)
        return y

    def of_experts(
        self, y: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None
    ) -> torch.Tensor:
        """The sum of the ranks' `dsa.combine_experts` of these arguments, for which `takes_experts` is true."""
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
    """The sum of a group of ranks. All ranks call this together, the first time before a CUDA graph is captured. None
    without NCCL, on several machines, without kernels on a rank, and if GPUs cannot write to each other's memory."""
    ranks = dist.get_world_size(group)

    def memory() -> torch.Tensor:
        # Zero before the ranks vote, so before any part arrives.
        return allocate((HALVES, ranks, _places(ranks), 4), torch.int32, device).zero_()

    problem = backends.why_no_kernels()
    return made_by_all(group, device, "sums go", memory, lambda memory: OneShotSum(group, memory), problem)


def _places(ranks: int) -> int:
    """How many pieces of PART bytes a part may have, so that all parts fit into MEMORY."""
    return MEMORY // (HALVES * ranks * 2 * PART)
