"""Where the rows of packed tokens lie in a paged cache: the same for all layers of a pass."""

import torch

from dsa.kernels.cache.limits import MAX_MAPPED
from dsa.reference.cache import slot_mapping as reference
from dsa.runtime.op import op

__all__ = ["slot_mapping"]


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
    """slots[t] = block_table[b, r // page_size] * page_size + r % page_size: where token t's row r lies in a cache.

    Token t = cu_seqlens[b] + i is number i of the n tokens of sequence b. They are the last of its cached tokens, so
    that its position is p = cache_seqlens[b] - n + i. A row is a token, r = p, or `ratio` of them, r = p // ratio.

    block_table    [B, max_pages] int32: physical pages of each sequence
    cu_seqlens     [B + 1] int32, not decreasing: sequence b has the tokens cu_seqlens[b] up to cu_seqlens[b + 1]
    cache_seqlens  [B] int32, tokens per sequence, these own included; None: there are no others, and p = i
    num_tokens     T, how many tokens there are, at least 0; those of no sequence have no slot
    page_size      rows per page, at least 1
    ratio          tokens per row, at least 1: a compressed entry goes where the token that ends it says, the one with
                   (p + 1) % ratio == 0; the others have no slot
    ring           a sequence's pages are a ring of R = max_pages * page_size rows, which holds its last R rows: r mod R
                   takes the place of r, and rows that later ones of the cached tokens overwrite have no slot

    Returns [num_tokens] int64, contiguous: slots as `write_kv_cache` and `read_kv_cache` take them, and -1 for a token
    that has none. It has none, too, if its position or its page is negative, its page outside the table, or its
    sequence longer than 2^31 - 1 tokens. Boundaries that decrease or lie outside are no error: of sequences that
    overlap, a token belongs to the one that begins last. A boundary below 0 or beyond num_tokens thus changes only the
    slots of the sequences beside it.
    Raises TypeError or ValueError for other types, dtypes, shapes, sizes and devices.
    On Hopper: one kernel, any strides; num_tokens, page_size and ratio up to 2^30. Deterministic. CUDA-graph safe with
    new tables, boundaries and lengths, no host synchronisation, no workspace.
    Source: vLLM's and SGLang's slot mapping; the rings and compressed entries of DeepSeek-V4 (arXiv 2606.19348).
    """
    return _slot_mapping(block_table, cu_seqlens, cache_seqlens, num_tokens, page_size, ratio, ring)


def _check_limits(num_tokens: int, page_size: int, ratio: int) -> None:
    for name, size in {"num_tokens": num_tokens, "page_size": page_size, "ratio": ratio}.items():
        if size > MAX_MAPPED:
            raise ValueError(f"{name}: the kernel takes at most {MAX_MAPPED}, got {size}")


def _slots(block_table: torch.Tensor, num_tokens: int) -> torch.Tensor:
    return block_table.new_empty(num_tokens, dtype=torch.int64)


@op(
    arguments=reference.SLOT_MAPPING,
    reference=reference.slot_mapping,
    results=_slots,
    limits=_check_limits,
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
