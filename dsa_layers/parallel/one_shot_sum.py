"""Sums of little over two GPUs: each reads the other's part from its memory, in one kernel."""

import functools
import os
import warnings

import torch
import torch.distributed as dist

BYTES = 4 << 20  # of a part, at most
DTYPES = (torch.bfloat16, torch.float32)


def takes(x: torch.Tensor) -> bool:
    """Whether it sums such parts, which are contiguous: little, and it reads 16 bytes at a time."""
    aligned = x.nbytes % 16 == 0 and x.data_ptr() % 16 == 0
    return x.is_cuda and x.dtype in DTYPES and 0 < x.nbytes <= BYTES and aligned


class OneShotSum:
    """x_0 + x_1 of two ranks' x, rounded once: the bits of a sum in fp32 that is rounded then.

    It is torch's, over symmetric memory, and a CUDA graph may hold it. Its kernel copies a rank's part to where the
    other one reads it; both wait for each other before and after, without an end. (Of more than two ranks torch rounds
    after each.)
    """

    def __init__(self, group: dist.ProcessGroup, memory: torch.Tensor) -> None:
        from torch.distributed import _symmetric_memory

        self._group, self._memory = group.group_name, memory
        self._sum = torch.ops.symm_mem.one_shot_all_reduce_copy
        _symmetric_memory.rendezvous(memory, group)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        memory = self._memory[: x.nbytes].view(x.dtype).view(x.shape)
        return self._sum(memory, x, "sum", self._group)


@functools.cache
def one_shot_sum(group: dist.ProcessGroup, device: torch.device) -> OneShotSum | None:
    """That of a group of ranks, all of which ask for it at the same time, the first time before a CUDA graph; None
    where there is none: of other than two, without NCCL, and of GPUs that cannot read each other's memory."""
    # A group of several kinds of devices has a backend for each.
    nccl = "cuda:nccl" in dist.get_backend_config(group).split(",")
    if dist.get_world_size(group) != 2 or not nccl:
        return None
    # Multicast objects of NVLink are not used here, and to make them may hang.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    problem, made = None, None
    try:
        from torch.distributed import _symmetric_memory

        memory = _symmetric_memory.empty(BYTES, dtype=torch.uint8, device=device)
    except (RuntimeError, AttributeError, ImportError) as error:
        problem = error
    if _both(problem is None, group, device):  # a rank that has none would leave the other one waiting
        try:
            made = OneShotSum(group, memory)
        except (RuntimeError, AttributeError) as error:
            problem = error
        if _both(made is not None, group, device):
            return made
    reason = problem or "the other rank has none"
    warnings.warn(f"sums go through NCCL, not through symmetric memory: {reason}", stacklevel=2)
    return None


def _both(yes: bool, group: dist.ProcessGroup, device: torch.device) -> bool:
    votes = torch.tensor(yes, dtype=torch.int32, device=device)
    dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=group)
    return bool(votes.item())
