"""Lists of the keys in each query's sliding window, for sparse attention. All layers of a forward pass use the same
lists."""

import torch

from dsa.kernels.mla.limits import MAX_WINDOW
from dsa.reference.mla import window_indices as reference
from dsa.runtime.declare import INT32, MOST_SLOTS, Arguments, Int, Tensor, at_most, op

__all__ = ["window_indices", "window_slots"]


def _check_ring(
    block_table: torch.Tensor | None, cache_seqlens: torch.Tensor, s_q: int, page_size: int, window: int
) -> None:
    if block_table is not None:
        return
    if page_size < window + s_q - 1:
        raise ValueError(
            f"page_size: a ring must hold window + s_q - 1 = {window + s_q - 1} keys without a block_table, "
            f"got {page_size}"
        )
    batch = cache_seqlens.shape[0]
    if batch * page_size > MOST_SLOTS:
        raise ValueError(
            f"page_size: the rings of cache_seqlens' {batch} sequences must have at most 2^31 slots together, got "
            f"{page_size} each"
        )


WINDOW_INDICES = Arguments(
    cu_seqlens_q=Tensor("B+1", INT32),
    cu_seqlens_k=Tensor("B+1", INT32),
    total_q=Int(least=0),
    window=Int(),
)
WINDOW_SLOTS = Arguments(
    rule=_check_ring,
    first=("cache_seqlens",),
    block_table=Tensor("B max_pages", INT32, optional=True),
    cache_seqlens=Tensor("B", INT32),
    s_q=Int(least=0),
    page_size=Int(),
    window=Int(),
)


def window_indices(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, total_q: int, window: int) -> torch.Tensor:
    """indices[t] = k0 + max(0, p - window + 1), ..., k0 + p: the keys that query t sees.

    Query t = cu_seqlens_q[b] + i is number i of the Lq queries of sequence b, whose Lk keys begin at k0 =
    cu_seqlens_k[b]. p is the query's position among these keys. The queries have the last positions: p = Lk - Lq + i. A
    query with p < 0 sees no key.

    cu_seqlens_q  [B + 1] int32, not decreasing: sequence b has the queries cu_seqlens_q[b] up to cu_seqlens_q[b + 1]
    cu_seqlens_k  [B + 1] int32, likewise for the keys
    total_q       the number of queries, at least 0; queries that belong to no sequence see no key
    window        maximum number of keys that a query sees, including its own key; at least 1

    Returns [total_q, window] int32, contiguous: the rows of kv to which `sliding_window_attention` attends, ascending,
    with -1 after the last one. Each index is below the largest number in cu_seqlens_k, and so fits in int32. Boundaries
    that decrease or lie outside [0, total_q] raise no error. Of the non-empty sequences that begin at or before a
    query, only the sequence that begins last can contain the query. If it ends at or before the query, the query
    belongs to no sequence. So a boundary below 0 or beyond total_q changes only the lists of the sequences before and
    after it. An index is still -1 or at least 0, and no memory outside the arguments is read.
    Raises TypeError or ValueError for other types, dtypes, shapes and devices.
    On Hopper: one kernel, any strides, total_q and window up to 2^30. Deterministic. CUDA-graph safe with new
    cu_seqlens, no host synchronisation, no workspace.
    Source: DeepSeek-V4 (arXiv 2606.19348), the window branch.
    """
    return _window_indices(cu_seqlens_q, cu_seqlens_k, total_q, window)


def window_slots(
    block_table: torch.Tensor | None, cache_seqlens: torch.Tensor, s_q: int, page_size: int, window: int
) -> torch.Tensor:
    """slots[b, i] = the cache slots of the keys max(0, p - window + 1), ..., p of sequence b, which query i sees.

    p = cache_seqlens[b] - s_q + i, because the queries have the last positions of the cached keys. A query with p < 0
    sees no key.

    block_table    [B, max_pages] int32: key s is in slot block_table[b, s // page_size] * page_size + s % page_size.
                   None: page b is a ring of sequence b's keys, and key s is in slot b * page_size + s % page_size
    cache_seqlens  [B] int32, keys per sequence, including the keys of the queries' tokens
    s_q            queries per sequence, at least 0
    page_size      keys per page; in a ring at least window + s_q - 1, the number of keys that all queries of a sequence
                   see together
    window         maximum number of keys that a query sees, including its own key; at least 1

    Returns [B, s_q, window] int32, contiguous: indices for `flash_mla_with_kvcache`, ordered by position, with -1 after
    the last key. A key's slot is also -1 if its page is negative or outside the table, or if the slot does not fit in
    int32.
    Raises TypeError or ValueError for other types, dtypes, shapes, sizes and devices, also for a ring of more than 2^31
    slots.
    On Hopper: one kernel, any strides; B * s_q, page_size and window up to 2^30. Deterministic. CUDA-graph safe with
    new tables and lengths, no host synchronisation, no workspace.
    Source: the window branch of DeepSeek-V4 (arXiv 2606.19348); its public code uses a ring, inference engines use
    pages.
    """
    return _window_slots(block_table, cache_seqlens, s_q, page_size, window)


def _indices(cu_seqlens_q: torch.Tensor, total_q: int, window: int) -> torch.Tensor:
    return cu_seqlens_q.new_empty(total_q, window)


@op(
    arguments=WINDOW_INDICES,
    reference=reference.window_indices,
    results=_indices,
    limits={"total_q": at_most(MAX_WINDOW), "window": at_most(MAX_WINDOW)},
)
def _window_indices(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, total_q: int, window: int) -> torch.Tensor:
    from dsa.kernels.mla.window_indices_sm90 import compile_window_indices

    indices = _indices(cu_seqlens_q, total_q, window)
    if total_q:
        compile_window_indices()(cu_seqlens_q, cu_seqlens_k, indices)
    return indices


def _slots(cache_seqlens: torch.Tensor, s_q: int, window: int) -> torch.Tensor:
    return cache_seqlens.new_empty(cache_seqlens.shape[0], s_q, window)


@op(
    arguments=WINDOW_SLOTS,
    reference=reference.window_slots,
    results=_slots,
    limits={"B*s_q": at_most(MAX_WINDOW), "page_size": at_most(MAX_WINDOW), "window": at_most(MAX_WINDOW)},
)
def _window_slots(
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor,
    s_q: int,
    page_size: int,
    window: int,
) -> torch.Tensor:
    from dsa.kernels.mla.window_indices_sm90 import compile_window_slots

    slots = _slots(cache_seqlens, s_q, window)
    if block_table is not None and block_table.shape[1] == 0:
        return slots.fill_(-1)
    if cache_seqlens.shape[0] * s_q:
        ring = block_table is None
        compile_window_slots(ring)(block_table, cache_seqlens, slots, page_size)
    return slots
