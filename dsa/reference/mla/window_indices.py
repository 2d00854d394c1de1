"""The keys of a sliding window as lists for sparse attention: indices of packed keys, or slots of a cache."""

import torch


def window_indices(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, total_q: int, window: int) -> torch.Tensor:
    """indices[t] = k0 + max(0, p - window + 1), ..., k0 + p: the keys that query t sees, and then -1 up to `window`
    numbers.

    Query t = cu_seqlens_q[b] + i is number i of the Lq queries of sequence b, whose Lk keys begin at k0 =
    cu_seqlens_k[b]. p is the query's position among these keys. The queries are the last of the sequence's tokens: p =
    Lk - Lq + i, and a query with p < 0 sees no key.

    If boundaries do not ascend, sequences can overlap. Of the sequences that have queries and begin at or before t,
    query t can belong only to the one that begins last. If this sequence ends at or before t, query t belongs to no
    sequence. Arguments as in `dsa.window_indices`.
    Source: DeepSeek-V4 (arXiv 2606.19348), the window branch.
    """
    q_starts, k_starts = cu_seqlens_q.long(), cu_seqlens_k.long()
    if len(q_starts) == 1:
        return torch.full((total_q, window), -1, dtype=torch.int32, device=q_starts.device)
    t = torch.arange(total_q, device=q_starts.device)
    begins = q_starts[:-1].masked_fill(q_starts[:-1] >= q_starts[1:], 2**31)
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
    """slots[b, i] = the cache slots of the keys max(0, p - window + 1), ..., p of sequence b, which query i sees.

    p = cache_seqlens[b] - s_q + i, because the queries are the last of the cached tokens. A query with p < 0 sees no
    key.

    Key s is in slot block_table[b, s // page_size] * page_size + s % page_size. If block_table is None, page b is a
    ring of sequence b's keys, and key s is in slot b * page_size + s % page_size. -1 stands for keys without a slot,
    and fills up the list. Arguments as in `dsa.window_slots`.
    Source: the window branch of DeepSeek-V4 (arXiv 2606.19348); its public code uses a ring, inference engines use
    pages.
    """
    batch, device = cache_seqlens.shape[0], cache_seqlens.device
    last = cache_seqlens.long()[:, None] - s_q + torch.arange(s_q, device=device)
    position = (last - window + 1).clamp(min=0)[..., None] + torch.arange(window, device=device)
    if block_table is None:
        page = torch.arange(batch, device=device)[:, None, None]
    else:
        # Positions outside the table get the page -1.
        table = torch.nn.functional.pad(block_table.long(), (0, 1), value=-1)
        place = (position // page_size).clamp(max=block_table.shape[1])
        page = table.gather(1, place.flatten(1)).view(place.shape)
    slot = page * page_size + position % page_size
    exists = (position <= last[..., None]) & (page >= 0) & (slot < 2**31)
    return torch.where(exists, slot, -1).int()
