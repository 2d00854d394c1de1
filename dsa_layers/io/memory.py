"""Query the free memory of a GPU."""

import torch

# Fraction of a GPU's memory for weights and caches. The remainder is for activations, scores, kernels, CUDA, NCCL and
# copies.
SHARE = 0.9


def room_for_caches(device: torch.device) -> int:
    """Return how many more bytes caches may allocate on a GPU.

    This is the free memory minus (1 - SHARE) of the total memory, which is left for passes.
    """
    free, total = torch.cuda.mem_get_info(device)
    # Memory that torch's caching allocator holds without using it counts as free.
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(free + unused - int((1 - SHARE) * total), 0)
