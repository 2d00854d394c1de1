"""The sparse stage's loss of the indexer: its scores over the selected keys follow the attention to them.

The target is a constant: the indexer learns from its loss alone, and the attention from the language model's alone.
"""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.indexer.index_scores import index_scores
from dsa.reference.training.masked_softmax import DTYPES, kl_divergence, masked_softmax, rows_of, selected, work_dtype
from dsa.runtime.arguments import ROWS, Arguments, Flag, Number, Tensor
from dsa.runtime.checks import INT32, check_memory

SPARSE_INDEXER_LOSS = Arguments(
    q=Tensor("Tq H d", DTYPES),
    kv=Tensor("Tk 1 d", DTYPES, like="q", layout=ROWS),
    q_idx=Tensor("Tq Hi di", DTYPES, like="q"),
    k_idx=Tensor("Tk di", DTYPES, like="q_idx", layout=ROWS),
    w_idx=Tensor("Tq Hi", DTYPES, like="q_idx", besides=(torch.float32,)),
    indices=Tensor("Tq 1 K", INT32),
    softmax_scale=Number(),
    lse=Tensor("H Tq", DTYPES, optional=True),
    deterministic=Flag(optional=True),
)


@without_autocast
def sparse_indexer_loss(
    q: torch.Tensor,
    kv: torch.Tensor,
    q_idx: torch.Tensor,
    k_idx: torch.Tensor,
    w_idx: torch.Tensor,
    indices: torch.Tensor,
    softmax_scale: float,
    lse: torch.Tensor | None = None,
    deterministic: bool | None = None,
) -> torch.Tensor:
    """kl[t] = KL(p[t] || softmax_j(I[t, j])) over the keys j in indices[t]: the sparse stage's loss of the indexer.

    p[t, j] = sum_h exp(softmax_scale q_h[t] . kv[j] - lse_h[t]), divided by its sum over j
    I[t, j] = sum_i w_idx[t, i] relu(q_idx_i[t] . k_idx[j])

    lse is each head's LSE over all that its softmax covers; None stands for the LSE over the selected keys alone, so
    that every head counts the same. A query without keys has kl 0. Gradients reach q_idx, k_idx and w_idx only.
    Arguments as of `dsa.sparse_indexer_loss`; `deterministic` is for the kernels.
    Source: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1.1.
    """
    SPARSE_INDEXER_LOSS.check(q, kv, q_idx, k_idx, w_idx, indices, softmax_scale, lse, deterministic)
    check_memory("q", q)
    work = work_dtype(q)
    index, valid = selected(indices, len(kv))
    with torch.no_grad():
        logits = softmax_scale * torch.einsum(
            "thd,tjd->htj", q.to(work).contiguous(), rows_of(kv[:, 0].to(work), index)
        )
        own_weights, own_lse = masked_softmax(logits, valid)
        if lse is not None:
            # Each head's share of its whole softmax, in logs: all of them may be tiny.
            share = (own_lse - lse.to(work)).masked_fill(own_lse == torch.inf, 0.0)
            own_weights = own_weights * torch.softmax(share, 0)[..., None]
        p = own_weights.sum(0)
        p = p / p.sum(-1, keepdim=True).clamp(min=torch.finfo(work).tiny)
    return kl_divergence(p, index_scores(q_idx, rows_of(k_idx, index), w_idx), valid)
