"""Slots in a paged cache for the new tokens of packed sequences."""

import torch

INT_MAX = 2**31 - 1


def slot_mapping(
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cache_seqlens: torch.Tensor | None,
    num_tokens: int,
    page_size: int,
    *,
    ratio: int = 1,
    ring: bool = False,
) -> torch.Tensor:
    """slots[t] = block_table[b, r // page_size] * page_size + r % page_size: the slot of token t's row r in a cache.

    Token t = cu_seqlens[b] + i is number i of the n new tokens of sequence b. The new tokens are the last of the
    sequence's cache_seqlens[b] tokens, so the position is p = cache_seqlens[b] - n + i. Without cache_seqlens p = i.

    A row covers `ratio` tokens: r = p // ratio. The token that ends a row gets the row's slot; the other tokens get -1.
    With `ring`, the cache keeps the last R = max_pages * page_size rows of a sequence. Then the formula uses r mod R
    instead of r, and tokens of earlier rows get -1.

    If sequences overlap, a token belongs to the sequence that begins last. Arguments as in `dsa.slot_mapping`.
    Source: vLLM's and SGLang's slot mapping; the rings and compressed entries of DeepSeek-V4 (arXiv 2606.19348).
    """
    batch, max_pages = block_table.shape
    t = torch.arange(num_tokens, device=block_table.device)
    if block_table.numel() == 0:
        return torch.full_like(t, -1)
    begins, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    has = (begins <= t[:, None]) & (t[:, None] < ends)
    # Of the sequences that contain t, take the one that begins last. argmax returns the first of equal numbers, hence
    # the flip.
    b = batch - 1 - torch.where(has, begins, -INT_MAX - 2).flip(1).argmax(1)
    length = ends - begins if cache_seqlens is None else cache_seqlens.long()
    position = (length - ends)[b] + t
    row, capacity = position // ratio, max_pages * page_size
    exists = has.any(1) & (position >= 0) & (length[b] <= INT_MAX) & ((position + 1) % ratio == 0)
    if ring:
        exists &= row >= (length // ratio)[b] - capacity
        row = row % capacity
    exists &= row < capacity
    page = block_table[b, torch.where(exists, row // page_size, 0)].long()
    return torch.where(exists & (page >= 0), page * page_size + row % page_size, -1)
