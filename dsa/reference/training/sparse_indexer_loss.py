"""The indexer's loss in the sparse stage of training. It trains the scores of the selected keys to follow the attention
to these keys.

The loss gives the attention no gradient: the indexer learns only from this loss, and the attention only from the
language model's loss.
"""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.indexer.index_scores import index_scores
from dsa.reference.training.masked_softmax import (
    index_scores_gradient,
    kl_divergence,
    kl_gradient,
    masked_softmax,
    rows_of,
    selected,
    sum_of_rows,
    work_dtype,
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
    """kl[t] = KL(p[t] || softmax_j(I[t, j])) over the keys j in indices[t]: the indexer's loss in the sparse stage.

    p[t, j] = sum_h exp(softmax_scale q_h[t] . kv[j] - lse_h[t]), divided by its sum over j
    I[t, j] = sum_i w_idx[t, i] relu(q_idx_i[t] . k_idx[j])

    lse_h is the LSE over all keys that the softmax of head h covers. None means the LSE over the selected keys alone,
    so that every head has the same weight in p. A query without keys has kl 0. Gradients reach q_idx, k_idx and w_idx
    only. `deterministic` affects only the kernels. Arguments as in `dsa.sparse_indexer_loss`.
    Source: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1.1.
    """
    return loss_and_score_gradient(q, kv, q_idx, k_idx, w_idx, indices, softmax_scale, lse)[0]


@without_autocast
def loss_and_score_gradient(
    q: torch.Tensor,
    kv: torch.Tensor,
    q_idx: torch.Tensor,
    k_idx: torch.Tensor,
    w_idx: torch.Tensor,
    indices: torch.Tensor,
    softmax_scale: float,
    lse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return kl of `sparse_indexer_loss`, and, without autograd history, the gradient [Tq, K] of kl with respect to
    I."""
    index, valid = selected(indices, len(kv))
    # Rows in the work dtype, so that the gradients of a key's copies are summed in it.
    scores = index_scores(q_idx, rows_of(k_idx.to(work_dtype(q_idx)), index), w_idx)
    with torch.no_grad():
        p = _target(q, kv, index, valid, softmax_scale, lse)
        d_scores = kl_gradient(p, scores, valid)
    return kl_divergence(p, scores, valid), d_scores


def _target(
    q: torch.Tensor,
    kv: torch.Tensor,
    index: torch.Tensor,
    valid: torch.Tensor,
    softmax_scale: float,
    lse: torch.Tensor | None,
) -> torch.Tensor:
    work = work_dtype(q)
    logits = softmax_scale * torch.einsum("thd,tjd->htj", q.to(work).contiguous(), rows_of(kv[:, 0].to(work), index))
    weights, own_lse = masked_softmax(logits, valid)
    if lse is not None:
        # `share` is the logarithm of the fraction of a head's softmax that falls on the selected keys. These fractions
        # can be too small for fp32 in all heads.
        share = (own_lse - lse.to(work)).masked_fill(own_lse == torch.inf, 0.0)
        weights = weights * torch.softmax(share, 0)[..., None]
    p = weights.sum(0)
    return p / p.sum(-1, keepdim=True).clamp(min=torch.finfo(work).tiny)


@without_autocast
def sparse_indexer_loss_gradient(
    grad: torch.Tensor,
    q_idx: torch.Tensor,
    k_idx: torch.Tensor,
    w_idx: torch.Tensor,
    indices: torch.Tensor,
    d_scores: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q_idx, k_idx and w_idx for the gradient `grad` [Tq] of kl.

    d_scores: [Tq, at least K], the gradient of kl with respect to I. Only its first K columns are read, because the
    kernels pad it.
    """
    index, _ = selected(indices, len(k_idx))
    of_scores = grad.to(work_dtype(q_idx))[:, None] * d_scores[:, : index.shape[1]]
    dq, of_rows, dw = index_scores_gradient(of_scores, q_idx, rows_of(k_idx, index), w_idx)
    return dq.to(q_idx.dtype), sum_of_rows(of_rows, index, len(k_idx)).to(k_idx.dtype), dw.to(w_idx.dtype)
