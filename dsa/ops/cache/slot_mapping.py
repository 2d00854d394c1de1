"""Slots of packed tokens in a paged cache. All layers of a forward pass use the same slots."""

import torch

from dsa.kernels.cache.limits import MAX_MAPPED
from dsa.reference.cache import slot_mapping as reference
from dsa.runtime.declare import INT32, Arguments, Flag, Int, Tensor, at_most, op

__all__ = ["slot_mapping"]

SLOT_MAPPING = Arguments(
    block_table=Tensor("B max_pages", INT32),
    cu_seqlens=Tensor("B+1", INT32),
    cache_seqlens=Tensor("B", INT32, optional=True),
    num_tokens=Int(least=0),
    page_size=Int(),
    ratio=Int(),
    ring=Flag(),
)


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
    sequence's cached tokens, so token t has position p = cache_seqlens[b] - n + i. A row of the cache covers `ratio`
    tokens: r = p // ratio.

    block_table    [B, max_pages] int32: physical pages of each sequence
    cu_seqlens     [B + 1] int32, not decreasing: sequence b has the tokens cu_seqlens[b] up to cu_seqlens[b + 1]
    cache_seqlens  [B] int32: cached tokens per sequence, including the new tokens. None: all tokens are new, and p = i
    num_tokens     T, the number of tokens, at least 0; a token that belongs to no sequence has no slot
    page_size      rows per page, at least 1
    ratio          tokens per row, at least 1. The token that ends a row, (p + 1) % ratio == 0, has the row's slot; the
                   row's other tokens have no slot
    ring           True: the pages of a sequence are a ring of R = max_pages * page_size rows, which stores the last R
                   rows: the formula uses r mod R instead of r. A token whose row is overwritten by a later cached token
                   has no slot

    Returns [num_tokens] int64, contiguous: slots for `write_kv_cache` and `read_kv_cache`. A token without a slot gets
    -1. A token also has no slot if its position or page is negative, if its page is outside the table, or if its
    sequence is longer than 2^31 - 1 tokens. Boundaries that decrease or lie outside [0, num_tokens] raise no error: if
    sequences overlap, a token belongs to the sequence that begins last. A boundary below 0 or beyond num_tokens changes
    only the slots of the two sequences that it separates.
    Raises TypeError or ValueError for other types, dtypes, shapes, sizes and devices.
    On Hopper: one kernel, any strides; num_tokens, page_size and ratio up to 2^30. Deterministic. CUDA-graph safe with
    new tables, boundaries and lengths, no host synchronisation, no workspace.
    Source: vLLM's and SGLang's slot mapping; the rings and compressed entries of DeepSeek-V4 (arXiv 2606.19348).
    """
    return _slot_mapping(block_table, cu_seqlens, cache_seqlens, num_tokens, page_size, ratio, ring)


def _slots(block_table: torch.Tensor, num_tokens: int) -> torch.Tensor:
    return block_table.new_empty(num_tokens, dtype=torch.int64)


@op(
    arguments=SLOT_MAPPING,
    reference=reference.slot_mapping,
    results=_slots,
    limits=dict.fromkeys(("num_tokens", "page_size", "ratio"), at_most(MAX_MAPPED)),
)
def _slot_mapping(
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cache_seqlens: torch.Tensor | None,
    num_tokens: int,
    page_size: int,
    ratio: int,
    ring: bool,
) -> torch.Tensor:
    from dsa.kernels.cache.slot_mapping_sm90 import compile_slot_mapping

    slots = _slots(block_table, num_tokens)
    if block_table.numel() == 0:
        return slots.fill_(-1)
    if num_tokens:
        launch = compile_slot_mapping(cache_seqlens is not None, ring)
        launch(block_table, cu_seqlens, cache_seqlens, slots, page_size, ratio)
    return slots
