"""The lightning indexer's scores for keys in one tensor and the exact selection of the largest scores, in one op."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.indexer import topk_indices
from dsa.reference.indexer.fp8_mqa_logits import fp8_mqa_logits

# Scores per chunk of queries: 64 MiB in fp32.
_CHUNK = 2**24


def indexer_select(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    top_k: int,
    *,
    block_table: torch.Tensor | None = None,
    page_size: int | None = None,
    row_to_seq: torch.Tensor | None = None,
    return_values: bool = False,
    accumulators: torch.dtype = torch.float32,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`topk_indices(fp8_mqa_logits(q, kv, weights, ks, ke), top_k, starts=ks, lengths=ke - ks, ...)`.

    ks and ke are cu_seq_len_k_start and cu_seq_len_k_end, clipped to [0, keys]; `topk_indices` also gets block_table,
    page_size, row_to_seq and return_values. The scores are computed in fp32 for any `accumulators`, for a chunk of
    queries at a time. Arguments and results as in `dsa.indexer_select`.
    """
    options = top_k, block_table, page_size, row_to_seq, return_values, accumulators
    indices, values = indices_and_values(q, *kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, *options)
    return (indices, values) if return_values else indices


@without_autocast
def indices_and_values(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    top_k: int,
    block_table: torch.Tensor | None,
    page_size: int | None,
    row_to_seq: torch.Tensor | None,
    return_values: bool,
    accumulators: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (indices, values) of `indexer_select`; without return_values, values has shape [0, 0]."""
    queries, keys = len(q), len(k)
    if block_table is not None and row_to_seq is None:
        row_to_seq = torch.arange(queries, dtype=torch.int32, device=q.device)
    starts, ends = (x.clamp(0, keys) for x in (cu_seq_len_k_start, cu_seq_len_k_end))
    lengths = (ends - starts).clamp_min(0)
    indices = q.new_full((queries, top_k), -1, dtype=torch.int32)
    values = q.new_full((queries, top_k), -torch.inf, dtype=torch.float32)
    step = max(1, _CHUNK // max(1, keys))
    for first in range(0, queries, step):
        part = slice(first, first + step)
        scores = fp8_mqa_logits(q[part], (k, k_scale), weights[part], starts[part], ends[part])
        sequences = None if row_to_seq is None else row_to_seq[part]
        options = starts[part], lengths[part], block_table, page_size, sequences, False, True
        indices[part], values[part] = topk_indices.indices_and_values(scores, top_k, *options)
    values += 0.0  # replaces -0.0 by 0.0
    return indices, values if return_values else values.new_empty(0, 0)
