"""Sums of little over two GPUs: each reads the other's part from its memory, in one kernel, where NCCL takes twice the
time (on two H200s, of 1 x 7168 in bf16, 6.6 and 11.9 us; of 128 x 7168, 17 and 30)."""

import functools
import warnings

import torch
import torch.distributed as dist

BYTES = 4 << 20  # of a part, at most
DTYPES = (torch.bfloat16, torch.float32)


class OneShotSum:
    """x_0 + x_1 of two ranks' x, rounded once: the bits of a sum in fp32 that is rounded then.

    It is torch's, over symmetric memory, and a CUDA graph may hold it. Its kernel copies a rank's part to where the
    other one reads it; both wait for each other before and after. (Of more than two ranks torch rounds after each.)
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        from torch.distributed import _symmetric_memory

        self._group = group.group_name
        self._memory = _symmetric_memory.empty(BYTES, dtype=torch.uint8, device=device)
        _symmetric_memory.rendezvous(self._memory, group)

    def takes(self, x: torch.Tensor) -> bool:
        """Whether it sums such parts, which are contiguous: it reads 16 bytes at a time."""
        aligned = x.data_ptr() % 16 == 0 and x.nbytes % 16 == 0
        return x.dtype in DTYPES and 0 < x.nbytes <= BYTES and aligned

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        memory = self._memory[: x.nbytes].view(x.dtype).view(x.shape)
        return torch.ops.symm_mem.one_shot_all_reduce_copy(memory, x, "sum", self._group)


@functools.cache
def one_shot_sum(group: dist.ProcessGroup, device: torch.device) -> OneShotSum | None:
    """That of a group of ranks, all of which ask for it at the same time, the first time before a CUDA graph; None
    where there is none: of other than two, without NCCL, and of GPUs that cannot read each other's memory."""
    if device.type != "cuda" or dist.get_world_size(group) != 2 or dist.get_backend(group) != "nccl":
        return None
    made, problem = None, None
    try:
        made = OneShotSum(group, device)
    except RuntimeError as error:
        problem = error
    there = torch.tensor(made is not None, dtype=torch.int32, device=device)
    dist.all_reduce(there, op=dist.ReduceOp.MIN, group=group)
    if there.item():
        return made
    reason = problem or "the other rank has none"
    warnings.warn(f"sums go through NCCL, not through symmetric memory: {reason}", stacklevel=2)
    return None
