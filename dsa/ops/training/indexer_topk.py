"""The selection of training's sparse stage: each query's keys with the largest scores. Queries and keys are not
quantised."""

import torch

from dsa.kernels.training.limits import K_TILE, Q_TILE
from dsa.ops.indexer.topk_indices import MAX_K, topk_indices
from dsa.ops.training._indexer_gradient import active_shape, index_scores
from dsa.ops.training._warmup_sum import INDEXER_LIMITS, LEAST_WORKSPACE, Indexer, Plan, make_plan
from dsa.ops.training.sparse_mla_attention import DTYPES
from dsa.reference.training import indexer_topk as reference
from dsa.runtime.declare import INT32, Arguments, Flag, Int, Tensor, at_most, op

__all__ = ["indexer_topk"]

SEQUENCES = {
    "cu_seqlens_q": Tensor("B+1", INT32),
    "cu_seqlens_k": Tensor("B+1", INT32),
    "max_seqlen_q": Int(least=0),
    "max_seqlen_k": Int(least=0),
}
INDEXER_TOPK = Arguments(
    q_idx=Tensor("Tq Hi di", DTYPES),
    k_idx=Tensor("Tk di", DTYPES, like="q_idx"),
    w_idx=Tensor("Tq Hi", DTYPES, like="q_idx", besides=(torch.float32,)),
    top_k=Int(),
    **SEQUENCES,
    causal=Flag(),
)


def indexer_topk(
    q_idx: torch.Tensor,
    k_idx: torch.Tensor,
    w_idx: torch.Tensor,
    top_k: int,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = True,
) -> torch.Tensor:
    """Select for each query t of packed sequences the top_k visible keys s with the largest I[t, s] = sum_j w_idx[t, j]
    relu(q_idx_j[t] . k_idx[s]).

    q_idx         [Tq, Hi, di]; k_idx [Tk, di] in q_idx's dtype; w_idx [Tq, Hi] in q_idx's dtype or fp32, of any sign
    top_k         how many keys to pick, at least 1, possibly more than a sequence has
    cu_seqlens_q  int32 [B + 1], the boundaries of sequences in the queries, from 0 to Tq; cu_seqlens_k likewise for the
                  keys, to Tk
    max_seqlen_*  at least the length of the longest sequence. On Hopper a query that sees more keys than max_seqlen_k
                  rounded up to a multiple of 128 selects none
    causal        True: a sequence's last query sees all keys of the sequence, and each earlier query sees one key fewer
                  than the query after it.
                  False: every query sees all keys of its sequence

    Returns int32 [Tq, 1, top_k]: rows of k_idx in ascending order, then -1 if a query has fewer than top_k keys. Ties
    go to the lowest index; NaN is never picked. A query that belongs to no sequence selects no key. No gradients.
    Raises TypeError or ValueError for other types, dtypes, shapes and devices. The reference raises ValueError for
    cu_seqlens that do not ascend from 0 to the end; the kernels replace a boundary that is outside the tensor, or below
    an earlier boundary, by the boundary before it (the first boundary by 0).
    On Hopper: bf16 (w_idx also fp32), di 64 or 128, up to 64 heads, top_k up to 4096; other dtypes run the PyTorch
    reference, with a warning. Queries and keys are multiplied in bf16 and summed in fp32. The workspace contains the
    scores of a chunk of queries for all keys: at most 192 MiB, or more if the smallest chunk, 128 queries, needs more.
    CUDA-graph safe, no host synchronisation.
    Source: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1.
    """
    bounds = cu_seqlens_q, cu_seqlens_k
    return _indexer_topk(q_idx, k_idx, w_idx, top_k, *bounds, max_seqlen_q, max_seqlen_k, causal)


def _results(q_idx: torch.Tensor, top_k: int) -> torch.Tensor:
    return q_idx.new_empty(len(q_idx), 1, top_k, dtype=torch.int32)


@op(
    arguments=INDEXER_TOPK,
    reference=reference.indexer_topk,
    results=_results,
    limits=INDEXER_LIMITS | {"top_k": at_most(MAX_K)},
    recorded=False,
    dtypes=(torch.bfloat16,),
)
def _indexer_topk(
    q_idx: torch.Tensor,
    k_idx: torch.Tensor,
    w_idx: torch.Tensor,
    top_k: int,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
) -> torch.Tensor:
    sequences = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous(), max_seqlen_q, max_seqlen_k
    plan, _ = make_plan(sequences, len(q_idx), len(k_idx), causal)
    return _select(Indexer.of(*(x.detach() for x in (q_idx, k_idx, w_idx))), plan, top_k)


def _select(indexer: Indexer, plan: Plan, top_k: int) -> torch.Tensor:
    queries, heads, n = len(indexer.q), indexer.q.shape[1], plan.max_key_tiles
    device = indexer.q.device
    # The last row receives the results of missing rows of q tiles.
    found = torch.full((queries + 1, top_k), -1, dtype=torch.int32, device=device)
    if 0 in (queries, len(indexer.k), len(plan.q_tiles)):
        return found[:queries, None]
    # Bytes per q tile: the scores twice, as tiles and as rows, and the bits of active heads.
    chunks = plan.chunks(n * Q_TILE * K_TILE * (8 + heads // 8), LEAST_WORKSPACE)
    most = chunks[0].stop
    scores = torch.empty(most, n, Q_TILE, K_TILE, dtype=torch.float32, device=device)
    active = torch.empty(active_shape(most, heads, n), dtype=torch.int32, device=device)
    minus_k = -indexer.k
    row = torch.arange(Q_TILE, dtype=torch.int32, device=device)
    for chunk in chunks:
        own, size = plan.q_tiles[chunk], chunk.stop - chunk.start
        index_scores(indexer.q, minus_k, indexer.w, own, scores[:size], active[:size])
        first_query, count, first_key, keys, seen, step = (x[:, None] for x in own.unbind(1)[:6])
        visible = (seen + step * row).clamp(min=0).minimum(keys)
        there = row < count
        visible = visible * (there & (visible <= n * K_TILE))
        rows = scores[:size].transpose(1, 2).reshape(size * Q_TILE, n * K_TILE)
        indices = topk_indices(rows, top_k, lengths=visible.flatten())
        indices = torch.where(indices < 0, indices, indices + first_key.expand(-1, Q_TILE).reshape(-1, 1))
        found[torch.where(there, first_query + row, queries).flatten().long()] = indices
    return found[:queries, None]
