"""The keys of a sliding window as lists for sparse attention: indices of packed keys, and slots of a cache."""

import torch

from dsa.reference.checks import INT32, check_int, check_memory, check_positive, check_same_device, check_tensor

# The first slot that int32 cannot hold.
_SLOT_LIMIT = 2**31


def window_indices(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, total_q: int, window: int) -> torch.Tensor:
    """indices[t] = k0 + max(0, p - window + 1), ..., k0 + p: the keys that query t sees, p its position among them.

    Query t = cu_seqlens_q[b] + i is number i of the Lq queries of sequence b, whose Lk keys begin at k0 =
    cu_seqlens_k[b]. The queries are the last of the keys: p = Lk - Lq + i, and with p < 0 a query sees no key.

    cu_seqlens_q  [B + 1] int32, not decreasing: sequence b has the queries cu_seqlens_q[b] up to cu_seqlens_q[b + 1]
    cu_seqlens_k  [B + 1] int32, likewise for the keys
    total_q       queries, at least 0; those of no sequence see no key
    window        keys that a query sees at most, itself included; at least 1

    Returns [total_q, window] int32, ascending, with -1 behind the last key. Each index is below the largest number in
    cu_seqlens_k. In any order of boundaries a query belongs to the sequence with queries that begins last before it, if
    that ends behind it: a boundary below 0 or beyond total_q spoils the lists of the sequences beside it alone. An
    index is then still -1 or at least 0.
    Raises TypeError or ValueError for other types, dtypes and shapes.
    Source: DeepSeek-V4 (arXiv 2606.19348), the window branch.
    """
    check_indices(cu_seqlens_q, cu_seqlens_k, total_q, window)
    check_memory("cu_seqlens_q", cu_seqlens_q)
    q_starts, k_starts = cu_seqlens_q.long(), cu_seqlens_k.long()
    if len(q_starts) == 1:
        return torch.full((total_q, window), -1, dtype=torch.int32, device=q_starts.device)
    t = torch.arange(total_q, device=q_starts.device)
    begins = q_starts[:-1].masked_fill(q_starts[:-1] >= q_starts[1:], _SLOT_LIMIT)
    begins, order = begins.sort(stable=True)
    place = torch.searchsorted(begins, t, right=True) - 1
    b = order[place.clamp(min=0)]
    known = (place >= 0) & (t < q_starts[b + 1])
    last = k_starts[b + 1] - (q_starts[b + 1] - t)
    first = torch.maximum(k_starts[b], last - window + 1).clamp(min=0)
    index = first[:, None] + torch.arange(window, device=t.device)
    return torch.where(known[:, None] & (index <= last[:, None]), index, -1).int()


def window_slots(
    block_table: torch.Tensor | None, cache_seqlens: torch.Tensor, s_q: int, page_size: int, window: int
) -> torch.Tensor:
    """slots[b, i] = where the keys max(0, p - window + 1), ..., p of sequence b lie in its cache, for query i of s_q.

    p = cache_seqlens[b] - s_q + i: the queries are the last of the cached keys. With p < 0 a query sees no key.

    block_table    [B, max_pages] int32: key s is in slot block_table[b, s // page_size] * page_size + s % page_size.
                   None, a ring: sequence b has page b to itself, and key s is in slot b * page_size + s % page_size
    cache_seqlens  [B] int32, keys per sequence, the queries' own included
    s_q            queries per sequence, at least 0
    page_size      keys per page; of a ring at least window + s_q - 1, what all queries together see
    window         keys that a query sees at most, itself included; at least 1

    Returns [B, s_q, window] int32, from the lowest position to the highest, with -1 behind the last key, and also for
    a key whose page is negative or outside the table or whose slot is 2^31 or more.
    Raises TypeError or ValueError for other types, dtypes, shapes and sizes, also for a ring of more than 2^31 slots.
    Source: the window branch of DeepSeek-V4 (arXiv 2606.19348); its public code keeps a ring, engines keep pages.
    """
    check_slots(block_table, cache_seqlens, s_q, page_size, window)
    check_memory("cache_seqlens", cache_seqlens)
    batch, device = cache_seqlens.shape[0], cache_seqlens.device
    last = cache_seqlens.long()[:, None] - s_q + torch.arange(s_q, device=device)
    position = (last - window + 1).clamp(min=0)[..., None] + torch.arange(window, device=device)
    if block_table is None:
        page = torch.arange(batch, device=device)[:, None, None]
    else:
        # A page of -1 behind the others stands for what is outside the table.
        table = torch.nn.functional.pad(block_table.long(), (0, 1), value=-1)
        place = (position // page_size).clamp(max=block_table.shape[1])
        page = table.gather(1, place.flatten(1)).view(place.shape)
    slot = page * page_size + position % page_size
    exists = (position <= last[..., None]) & (page >= 0) & (slot < _SLOT_LIMIT)
    return torch.where(exists, slot, -1).int()


def check_indices(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, total_q: int, window: int) -> None:
    """The checks of `window_indices`."""
    check_boundaries(cu_seqlens_q, cu_seqlens_k)
    check_same_device(("cu_seqlens_q", cu_seqlens_q), cu_seqlens_k=cu_seqlens_k)
    check_int("total_q", total_q, 0)
    check_positive("window", window)


def check_boundaries(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor) -> None:
    """Both are [B + 1] int32; what they hold is not looked at."""
    check_tensor("cu_seqlens_q", cu_seqlens_q, INT32, ("B + 1",))
    if cu_seqlens_q.shape[0] == 0:
        raise ValueError("cu_seqlens_q: must have at least one entry, got shape [0]")
    check_tensor("cu_seqlens_k", cu_seqlens_k, INT32, ("B + 1",))
    if cu_seqlens_k.shape[0] != cu_seqlens_q.shape[0]:
        raise ValueError(
            f"cu_seqlens_k: must have as many entries as cu_seqlens_q = {cu_seqlens_q.shape[0]}, "
            f"got {cu_seqlens_k.shape[0]}"
        )


def check_slots(
    block_table: torch.Tensor | None, cache_seqlens: torch.Tensor, s_q: int, page_size: int, window: int
) -> None:
    """The checks of `window_slots`."""
    check_tensor("cache_seqlens", cache_seqlens, INT32, ("B",))
    check_int("s_q", s_q, 0)
    check_positive("page_size", page_size)
    check_positive("window", window)
    batch = cache_seqlens.shape[0]
    if block_table is not None:
        check_tensor("block_table", block_table, INT32, (batch, "max_pages"), "cache_seqlens")
        check_same_device(("cache_seqlens", cache_seqlens), block_table=block_table)
        return
    if page_size < window + s_q - 1:
        raise ValueError(
            f"page_size: a ring must hold window + s_q - 1 = {window + s_q - 1} keys without a block_table, "
            f"got {page_size}"
        )
    if batch * page_size > _SLOT_LIMIT:
        raise ValueError(
            f"page_size: the rings of cache_seqlens' {batch} sequences must have at most 2^31 slots together, got "
            f"{page_size} each"
        )
