"""Sparse MLA prefill of few heads where neighbouring queries share keys: the launch."""

import math

import torch

from dsa.kernels.mla.limits import GROUP_SIZES, MOST_UNION
from dsa.ops.mla._sparse_attention import (
    Results,
    Selection,
    aligned,
    list_arguments,
    no_partial,
    sink_arguments,
)
from dsa.runtime import backends
from dsa.runtime.declare import dtype_name

# The fewest indices for which grouping is tried. Where queries share few keys the attempt costs 15 us, and attention to
# so many keys takes 600 us.
LEAST_INDICES = 2**22
# The most keys for which grouping is tried. Building a group's list takes a pass over its indices for each 65536 or
# 131072 keys of the cache, selected or not: for a whole pool of pages that takes longer than groups save. A group of 8
# has no sample of keys beyond.
MOST_KEYS = 2**21


def may_share(q: torch.Tensor, selection: Selection) -> bool:
    """Whether to try groups of queries with few heads, a key of GROUP_SIZES at most: where there are enough groups for
    all SMs and not too many keys. Only the GPU knows which keys queries share."""
    queries, heads, _ = q.shape
    return (
        queries >= group_size(heads) * backends.num_sms(q.device)
        and queries * selection.indices.shape[2] >= LEAST_INDICES
        and selection.cache.shape[0] <= MOST_KEYS
    )


def group_size(heads: int) -> int:
    """Queries per group for this number of heads."""
    return next(size for most, size in GROUP_SIZES.items() if heads <= most)


def attend_groups(
    q: torch.Tensor,
    selection: Selection,
    scale: float,
    sink: torch.Tensor | None,
    results: Results,
) -> None:
    """q [T, h, d] over a selection, for up to 16 heads, with max_logits; T, h, K and s_kv above 0.

    The first kernel decides which groups to compute together. The second computes these groups, the third the other
    queries one by one."""
    from dsa.kernels.mla.selection_union_sm90 import compile_selection_union
    from dsa.kernels.mla.sparse_mla_queued_sm90 import compile_sparse_mla_queued
    from dsa.kernels.mla.sparse_mla_union_sm90 import compile_sparse_mla_union

    queries, heads, dim = q.shape
    dtype = dtype_name(q.dtype)
    size, num_sms = group_size(heads), backends.num_sms(q.device)
    q, groups = aligned(q), -(-queries // size)
    [cache], [indices], [counts], counted = list_arguments([selection], q.device)
    # The longest list of a group that is computed together.
    width = max(1, min(size * indices.shape[2] * MOST_UNION[0] // MOST_UNION[1], cache.shape[0]))

    def int32(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=q.device)

    lists, lengths, of_groups, of_queries = int32(groups, 1, width), int32(groups), int32(groups), int32(queries)
    queued = torch.zeros(2, dtype=torch.int32, device=q.device)
    compile_selection_union(size)(
        *(indices, counts, counted, cache.shape[0], lists, lengths, queued, of_groups, of_queries)
    )
    out, lse, max_logits = results
    sinks, scale = sink_arguments(sink, q.device), scale * math.log2(math.e)
    outputs = (out, lse, *no_partial(heads, q.device), max_logits, scale)
    compile_sparse_mla_union(dtype, dim, size)(
        *(q, cache, lists, lengths, *sinks, *outputs, min(num_sms, groups), queued, of_groups, of_queries)
    )
    compile_sparse_mla_queued(dtype, dim)(
        *(q, cache, indices, counts, counted, *sinks, *outputs, min(num_sms, queries), queued, of_queries)
    )
