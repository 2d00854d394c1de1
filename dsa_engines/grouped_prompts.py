"""The input with which warm-up compiles the kernels that compute adjacent queries of a long prompt together."""

import torch

from dsa.ops.mla._shared_keys import LEAST_INDICES, group_size
from dsa.runtime import backends


def grouped_prompt(heads: int, query_dim: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return (q [T, heads, query_dim] bf16, indices [T, 1, K], all -1) with the smallest T for which prefill tries to
    group adjacent queries. Return None if this number of heads is never grouped, or if no kernel runs."""
    size, one = group_size(heads), torch.zeros(1, heads, query_dim, dtype=torch.bfloat16)
    if size == 0 or not backends.runs_kernel("flash_mla_sparse_fwd", one):
        return None
    queries = size * backends.num_sms(one.device)
    indices = torch.full((queries, 1, -(-LEAST_INDICES // queries)), -1, dtype=torch.int32)
    return one.expand(queries, -1, -1).contiguous(), indices
