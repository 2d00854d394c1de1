"""Prompts so long that neighbouring tokens are looked at together, which few heads have kernels of their own for."""

import torch

from dsa.ops.mla._shared_keys import LEAST_INDICES, group_size
from dsa.runtime import backends


def grouped_prompt(heads: int, query_dim: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(q [T, heads, query_dim] bf16, indices [T, 1, K] of no key) of the fewest queries that groups are formed of; None
    where there are none of so many heads, or no kernel runs."""
    size, one = group_size(heads), torch.zeros(1, heads, query_dim, dtype=torch.bfloat16)
    if size == 0 or not backends.runs_kernel("flash_mla_sparse_fwd", one):
        return None
    queries = size * backends.num_sms(one.device)
    indices = torch.full((queries, 1, -(-LEAST_INDICES // queries)), -1, dtype=torch.int32)
    return one.expand(queries, -1, -1).contiguous(), indices
