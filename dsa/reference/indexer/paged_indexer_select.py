"""The lightning indexer's scores over a paged cache of keys and the exact selection of the largest scores, in one op,
for decoding."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.indexer import topk_indices
from dsa.reference.indexer.fp8_paged_mqa_logits import fp8_paged_mqa_logits

# Scores per chunk of sequences: 64 MiB in fp32.
_CHUNK = 2**24


def paged_indexer_select(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_context_len: int,
    top_k: int,
    *,
    slots: bool = False,
    return_values: bool = False,
    accumulators: torch.dtype = torch.float32,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`topk_indices(fp8_paged_mqa_logits(q, kv_cache, weights, context_lens, block_table, None, max_context_len),
    top_k, lengths=L)`. If `slots` is True, `topk_indices` also gets block_table, page_size and row_to_seq.

    L [B * next_n] is the number of keys that each query sees, clipped to [0, min(max_context_len, max_pages * P)]. The
    scores are computed in fp32 for any `accumulators`, for a chunk of sequences at a time. If the cache or the table
    has no pages, no key is selected. Arguments and results as in `dsa.paged_indexer_select`.
    """
    options = max_context_len, top_k, slots, return_values, accumulators
    indices, values = indices_and_values(q, kv_cache, weights, context_lens, block_table, *options)
    return (indices, values) if return_values else indices


@without_autocast
def indices_and_values(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_context_len: int,
    top_k: int,
    slots: bool,
    return_values: bool,
    accumulators: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (indices, values) of `paged_indexer_select`; without return_values, values has shape [0, 0]."""
    batch, next_n = q.shape[:2]
    pages, page_size = kv_cache.shape[:2]
    columns = min(max_context_len, block_table.shape[1] * page_size)
    lengths = context_lens.long()
    if lengths.dim() == 1:
        lengths = lengths[:, None] + torch.arange(1 - next_n, 1, device=q.device)
    lengths = lengths.clamp(0, columns).int()
    indices = q.new_full((batch * next_n, top_k), -1, dtype=torch.int32)
    values = q.new_full((batch * next_n, top_k), -torch.inf, dtype=torch.float32)
    step = max(1, _CHUNK // max(1, next_n * columns))
    for first in range(0, batch if pages and columns else 0, step):
        part, rows = slice(first, first + step), slice(first * next_n, (first + step) * next_n)
        table, seen = block_table[part], lengths[part]
        scores = fp8_paged_mqa_logits(q[part], kv_cache, weights[rows], seen, table, None, columns)
        paging = None, None, None
        if slots:
            sequences = torch.arange(len(seen), dtype=torch.int32, device=q.device)
            paging = table, page_size, sequences.repeat_interleave(next_n, output_size=len(scores))
        given = None, seen.flatten(), *paging, False, True
        indices[rows], values[rows] = topk_indices.indices_and_values(scores, top_k, *given)
    values += 0.0  # replaces -0.0 by 0.0
    return indices, values if return_values else values.new_empty(0, 0)
