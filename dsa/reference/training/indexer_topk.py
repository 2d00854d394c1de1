"""What the sparse stage of training attends to: each query's best keys by scores that are not quantised."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.indexer.index_scores import index_scores
from dsa.reference.indexer.topk_indices import topk_indices
from dsa.reference.training.masked_softmax import DTYPES
from dsa.reference.training.packed_sequences import SEQUENCES, check_bounds, sequence_ranges
from dsa.runtime.arguments import Arguments, Flag, Int, Tensor
from dsa.runtime.checks import check_memory


def _check_bounds(
    q_idx: torch.Tensor, k_idx: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor
) -> None:
    check_bounds(cu_seqlens_q, cu_seqlens_k, ("q_idx", q_idx), ("k_idx", k_idx))


INDEXER_TOPK = Arguments(
    rule=_check_bounds,
    q_idx=Tensor("Tq Hi di", DTYPES),
    k_idx=Tensor("Tk di", DTYPES, like="q_idx"),
    w_idx=Tensor("Tq Hi", DTYPES, like="q_idx", besides=(torch.float32,)),
    top_k=Int(),
    **SEQUENCES,
    causal=Flag(),
)


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
    """The top_k keys s of each query t of packed sequences by I[t, s] = sum_j w_idx[t, j] relu(q_idx_j[t] . k_idx[s]).

    Arguments as of `dsa.indexer_topk`. Scores are not quantised. Of equal ones the lowest index is picked; NaN never.
    No gradients. Source: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1.
    """
    bounds = (cu_seqlens_q, cu_seqlens_k)
    INDEXER_TOPK.check(q_idx, k_idx, w_idx, top_k, *bounds, max_seqlen_q, max_seqlen_k, causal)
    check_memory("q_idx", q_idx)
    found = [torch.full((0, top_k), -1, dtype=torch.int32, device=q_idx.device)]
    with torch.no_grad():
        for begin_q, end_q, begin_k, end_k in sequence_ranges(*bounds, ("q_idx", q_idx), ("k_idx", k_idx)):
            queries, keys = slice(begin_q, end_q), slice(begin_k, end_k)
            m, n = end_q - begin_q, end_k - begin_k
            scores = index_scores(q_idx[queries], k_idx[keys], w_idx[queries]).float()
            lengths = torch.full((m,), n, dtype=torch.int32, device=q_idx.device)
            if causal:
                lengths = (n - m + 1 + torch.arange(m, device=q_idx.device)).clamp(0, n).int()
            own = topk_indices(scores, top_k, lengths=lengths)
            found.append(torch.where(own < 0, own, own + begin_k))
    return torch.cat(found)[:, None]
