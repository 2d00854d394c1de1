"""Index scores over contiguous keys and the exact selection of the largest, in one."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.indexer import topk_indices
from dsa.reference.indexer.fp8_mqa_logits import ACCUMULATORS, FP8_MQA_LOGITS, fp8_mqa_logits, pair
from dsa.runtime.arguments import INNER, Arguments, Dtype, Flag, Int, Tensor
from dsa.runtime.checks import INT32

# Scores at a time: 64 MiB.
_CHUNK = 2**24


def _check_paging(
    q: torch.Tensor, block_table: torch.Tensor | None, page_size: int | None, row_to_seq: torch.Tensor | None
) -> None:
    """A row of scores for each query."""
    topk_indices._check_paging(q, block_table, page_size, row_to_seq)


_SCORES = {name: FP8_MQA_LOGITS.specs[name] for name in ("q", "k", "k_scale", "weights")}
INDEXER_SELECT = Arguments(
    rule=_check_paging,
    **_SCORES,
    cu_seq_len_k_start=Tensor("S", INT32, layout=INNER),
    cu_seq_len_k_end=Tensor("S", INT32, layout=INNER),
    top_k=Int(),
    block_table=Tensor("B max_pages", INT32, optional=True, layout=INNER),
    page_size=Int(optional=True),
    row_to_seq=Tensor("S", INT32, optional=True),
    return_values=Flag(),
    accumulators=Dtype(ACCUMULATORS),
)


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
    """`topk_indices(fp8_mqa_logits(q, kv, weights, ks, ke), top_k, starts=ks, lengths=ke - ks, ...)` with ks and ke
    clipped to the keys, some queries at a time; fp32 whatever the accumulators. Arguments and results as of
    `dsa.indexer_select`."""
    options = top_k, block_table, page_size, row_to_seq, return_values, accumulators
    indices, values = indices_and_values(q, *pair(kv), weights, cu_seq_len_k_start, cu_seq_len_k_end, *options)
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
    """What `indexer_select` returns, with values [0, 0] where they are not asked for."""
    ranges = cu_seq_len_k_start, cu_seq_len_k_end
    options = top_k, block_table, page_size, row_to_seq, return_values, accumulators
    INDEXER_SELECT.check(q, k, k_scale, weights, *ranges, *options)
    queries, keys = len(q), len(k)
    if block_table is not None and row_to_seq is None:
        row_to_seq = torch.arange(queries, dtype=torch.int32, device=q.device)
    starts, ends = (x.clamp(0, keys) for x in ranges)
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
    values += 0.0  # no -0.0
    return indices, values if return_values else values.new_empty(0, 0)
