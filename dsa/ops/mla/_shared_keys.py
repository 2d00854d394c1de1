"""Launch sparse MLA prefill for few heads. Adjacent queries form groups. If several queries of a group select a key,
the kernel reads this key once for all of them."""

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

# The smallest number of indices, queries times K, for which grouping is tried. A vain attempt costs 15 us. Attention
# with LEAST_INDICES indices takes 600 us.
LEAST_INDICES = 2**22
# The largest number of keys for which grouping is tried. selection_union_sm90.py passes over a group's indices once per
# 65536 (groups of 8) or 131072 (groups of 4) keys of the cache. With more keys the passes take longer than groups save.
# Also, the table of sampled keys of groups of 8 has no room for more.
MOST_KEYS = 2**21


def may_share(q: torch.Tensor, selection: Selection) -> bool:
    """Whether to try groups of queries. The caller checks that q has at most max(GROUP_SIZES) heads. A kernel decides
    for each group whether its queries are computed together, because only the GPU knows which keys they share."""
    queries, heads, _ = q.shape
    return (
        queries >= group_size(heads) * backends.num_sms(q.device)
        and queries * selection.indices.shape[2] >= LEAST_INDICES
        and selection.cache.shape[0] <= MOST_KEYS
    )


def group_size(heads: int) -> int:
    """Return the number of queries per group for this number of heads; 0 if there are too many heads for groups."""
    return next((size for most, size in GROUP_SIZES.items() if heads <= most), 0)


def attend_groups(
    q: torch.Tensor,
    selection: Selection,
    scale: float,
    sink: torch.Tensor | None,
    results: Results,
) -> None:
    """Write attention of q [T, h, d] to the selected keys into `results`, including max_logits. h is at most 16. No
    size is 0.

    The first kernel decides for each group whether its queries are computed together. If so, it lists the keys that
    they select. The second kernel computes these groups. The third kernel computes the queries of the remaining groups
    one by one."""
    from dsa.kernels.mla.selection_union_sm90 import compile_selection_union
    from dsa.kernels.mla.sparse_mla_queued_sm90 import compile_sparse_mla_queued
    from dsa.kernels.mla.sparse_mla_union_sm90 import compile_sparse_mla_union

    queries, heads, dim = q.shape
    dtype = dtype_name(q.dtype)
    size, num_sms = group_size(heads), backends.num_sms(q.device)
    q, groups = aligned(q), -(-queries // size)
    [cache], [indices], [counts], counted = list_arguments([selection], q.device)
    # The longest list of keys of a group that is computed together.
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
