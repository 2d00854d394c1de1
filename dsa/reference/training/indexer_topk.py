"""The selection of keys in the sparse stage of training: each query's top_k keys by index scores that are not
quantised."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.indexer.index_scores import index_scores
from dsa.reference.indexer.topk_indices import topk_indices
from dsa.reference.training.packed_sequences import sequence_ranges


@without_autocast
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
    """The top_k keys s with the largest I[t, s] = sum_j w_idx[t, j] relu(q_idx_j[t] . k_idx[s]) for every query t.

    Sequences are packed, and a query selects keys of the same sequence only. Returns rows of k_idx, int32 [Tq, 1,
    top_k], in ascending order, with -1 after them if the query sees fewer keys. Of equal scores the lowest index is
    picked; NaN is never picked. Not differentiable. Raises ValueError for cu_seqlens that do not ascend from 0 to the
    end. Arguments as in `dsa.indexer_topk`.
    Source: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1.
    """
    found = [torch.full((0, top_k), -1, dtype=torch.int32, device=q_idx.device)]
    with torch.no_grad():
        ranges = sequence_ranges(cu_seqlens_q, cu_seqlens_k, ("q_idx", q_idx), ("k_idx", k_idx))
        for begin_q, end_q, begin_k, end_k in ranges:
            queries, keys = slice(begin_q, end_q), slice(begin_k, end_k)
            m, n = end_q - begin_q, end_k - begin_k
            scores = index_scores(q_idx[queries], k_idx[keys], w_idx[queries]).float()
            lengths = torch.full((m,), n, dtype=torch.int32, device=q_idx.device)
            if causal:
                lengths = (n - m + 1 + torch.arange(m, device=q_idx.device)).clamp(0, n).int()
            own = topk_indices(scores, top_k, lengths=lengths)
            found.append(torch.where(own < 0, own, own + begin_k))
    return torch.cat(found)[:, None]
