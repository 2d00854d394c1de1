"""Index scores over a paged key cache and the exact selection of the largest, in one, for decoding."""

import torch

from dsa.reference.arguments import ALIGNED, Arguments, Dtype, Flag, Int, Tensor
from dsa.reference.autocast import without_autocast
from dsa.reference.cache import kv_cache as caches
from dsa.reference.checks import INT32, check_positive, check_updatable
from dsa.reference.indexer import topk_indices
from dsa.reference.indexer.fp8_mqa_logits import ACCUMULATORS
from dsa.reference.indexer.fp8_paged_mqa_logits import FP8_PAGED_MQA_LOGITS, fp8_paged_mqa_logits

WORKSPACE_WORDS = 8192  # of a query
# Scores at a time: 64 MiB.
_CHUNK = 2**24


def _check_workspace(q: torch.Tensor, workspace: torch.Tensor | None) -> None:
    queries = q.shape[0] * q.shape[1]
    if workspace is not None and workspace.shape[0] < queries:
        raise ValueError(
            f"workspace: must have a row for each of the {queries} queries, got shape {list(workspace.shape)}"
        )


_SCORES = ("q", "kv_cache", "weights", "context_lens", "block_table", "max_context_len")
PAGED_INDEXER_SELECT = Arguments(
    rule=_check_workspace,
    **{name: FP8_PAGED_MQA_LOGITS.specs[name] for name in _SCORES},
    top_k=Int(),
    slots=Flag(),
    return_values=Flag(),
    accumulators=Dtype(ACCUMULATORS),
    workspace=Tensor(f"rows {WORKSPACE_WORDS}", INT32, optional=True, written=True, layout=ALIGNED),
)


def paged_indexer_select_workspace(queries: int, device: torch.device | str | None = None) -> torch.Tensor:
    """What `dsa.paged_indexer_select` takes as `workspace` for up to so many queries, which are B * next_n.

    Returns zeros [queries, 8192] int32, 32 KiB a query. Raises TypeError or ValueError for a number of queries that is
    no positive int, and for a device that torch does not have.
    """
    check_positive("queries", queries)
    caches._check_device(device)
    return torch.zeros(queries, WORKSPACE_WORDS, dtype=torch.int32, device=device)


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
    workspace: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`topk_indices(fp8_paged_mqa_logits(q, kv_cache, weights, context_lens, block_table, None, max_context_len),
    top_k, lengths=L)`, with block_table, page_size and row_to_seq too for slots, some sequences at a time; fp32
    whatever the accumulators. L are the keys that each query sees, clipped to [0, min(max_context_len, max_pages P)].
    Of a cache without pages none is selected. The workspace stays as it is. Arguments and results as of
    `dsa.paged_indexer_select`."""
    options = max_context_len, top_k, slots, return_values, accumulators, workspace
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
    workspace: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `paged_indexer_select` returns, with values [0, 0] where they are not asked for."""
    options = max_context_len, top_k, slots, return_values, accumulators, workspace
    PAGED_INDEXER_SELECT.check(q, kv_cache, weights, context_lens, block_table, *options)
    if workspace is not None:
        check_updatable("workspace", workspace)
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
    values += 0.0  # no -0.0
    return indices, values if return_values else values.new_empty(0, 0)
