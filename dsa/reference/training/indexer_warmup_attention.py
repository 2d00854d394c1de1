"""The warm-up stage of training: dense attention, and a loss that trains the indexer to follow the attention.

The loss gives the attention no gradient: the indexer learns only from this loss, and the attention only from the
language model's loss.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.indexer.index_scores import index_scores
from dsa.reference.training.masked_softmax import (
    index_scores_gradient,
    kl_divergence,
    kl_gradient,
    masked_softmax,
    work_dtype,
)
from dsa.reference.training.packed_sequences import sequence_ranges


class _Sequence(NamedTuple):
    """A sequence with Tq queries and Tk keys: their slices of the packed tensors, the mask [Tq, Tk] of visible keys,
    and the scaled logits [H, Tq, Tk]."""

    queries: slice
    keys: slice
    visible: torch.Tensor
    logits: torch.Tensor


def _sequences(
    q: torch.Tensor,
    k: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    softmax_scale: float,
    causal: bool,
) -> Iterator[_Sequence]:
    for begin_q, end_q, begin_k, end_k in sequence_ranges(cu_seqlens_q, cu_seqlens_k, ("q", q), ("k", k)):
        queries, keys = slice(begin_q, end_q), slice(begin_k, end_k)
        m, n = end_q - begin_q, end_k - begin_k
        visible = torch.ones(m, n, dtype=torch.bool, device=q.device)
        if causal:
            visible = visible.tril(n - m)
        of_heads = _of_heads(k[keys], q.shape[1])
        logits = softmax_scale * torch.einsum("thd,shd->hts", q[queries].to(of_heads.dtype).contiguous(), of_heads)
        yield _Sequence(queries, keys, visible, logits)


def _of_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeat the heads of keys or values x [T, Hk, d]: [T, H, d], in the work dtype."""
    return x.to(work_dtype(x)).repeat_interleave(heads // x.shape[1], 1)


@without_autocast
def indexer_warmup_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_idx: torch.Tensor,
    k_idx: torch.Tensor,
    w_idx: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention of packed sequences, and the KL divergence of the indexer's distribution from the attention.

    A_h[t, s] = softmax_s(softmax_scale q_h[t] . k[s]);   out_h[t] = sum_s A_h[t, s] v[s]
    I[t, s] = sum_j w_idx[t, j] relu(q_idx_j[t] . k_idx[s])
    kl[t] = KL(p[t] || softmax_s(I[t])), p[t] = sum_h A_h[t] divided by its sum over s

    k and v are those of key head h // (H / Hk). Returns out [Tq, H, dv] in q's dtype, lse [H, Tq] (natural log) and kl
    [Tq], both fp32, or float64 if q is float64. A query without keys has out 0, lse +inf and kl 0. Gradients of out
    reach q, k and v; those of lse reach q and k; those of kl reach q_idx, k_idx and w_idx only. Raises ValueError for
    cu_seqlens that do not ascend from 0 to the end. Arguments as in `dsa.indexer_warmup_attention`.
    Source: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1.1.
    """
    work = work_dtype(q)
    outs, lses = [q.new_zeros(0, q.shape[1], v.shape[2])], [q.new_zeros(q.shape[1], 0, dtype=work)]
    kls = [q.new_zeros(0, dtype=work)]
    for queries, keys, visible, logits in _sequences(q, k, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal):
        weights, lse = masked_softmax(logits, visible)
        outs.append(torch.einsum("hts,shd->thd", weights, _of_heads(v[keys], q.shape[1])))
        lses.append(lse)
        scores = index_scores(q_idx[queries], k_idx[keys], w_idx[queries])
        kls.append(kl_divergence(weights.detach().mean(0), scores, visible))
    return torch.cat(outs).to(q.dtype), torch.cat(lses, 1), torch.cat(kls)


@without_autocast
def warmup_attention_gradient(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    bounds: torch.Tensor,
    softmax_scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v for the gradient `grad` of out.

    bounds: cu_seqlens_q and cu_seqlens_k, [2, B + 1].

    With g = grad and A the softmax weights, the gradient of the scaled logits is dlogits = A (g . v - g . out). Then dq
    = softmax_scale dlogits k, dk = softmax_scale dlogits^T q and dv = A^T g. dk and dv are summed over the query heads
    that share a key head.
    """
    work, heads, key_heads = work_dtype(q), q.shape[1], k.shape[1]
    dq, dk, dv = (torch.zeros_like(x, dtype=work) for x in (q, k, v))
    for queries, keys, visible, logits in _sequences(q, k, *bounds, softmax_scale, causal):
        weights, _ = masked_softmax(logits, visible)
        g, own_q = grad[queries].to(work), q[queries].to(work)
        delta = (g * out[queries].to(work)).sum(-1).T
        of_weights = torch.einsum("thd,shd->hts", g, _of_heads(v[keys], heads))
        of_logits = softmax_scale * weights * (of_weights - delta[..., None])
        dq[queries] = torch.einsum("hts,shd->thd", of_logits, _of_heads(k[keys], heads))
        dk[keys] = torch.einsum("hts,thd->shd", of_logits, own_q).unflatten(1, (key_heads, -1)).sum(2)
        dv[keys] = torch.einsum("hts,thd->shd", weights, g).unflatten(1, (key_heads, -1)).sum(2)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


@without_autocast
def warmup_loss_gradient(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    q_idx: torch.Tensor,
    k_idx: torch.Tensor,
    w_idx: torch.Tensor,
    bounds: torch.Tensor,
    softmax_scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q_idx, k_idx and w_idx for the gradient `grad` [Tq] of kl.

    bounds: cu_seqlens_q and cu_seqlens_k, [2, B + 1].
    """
    work = work_dtype(q)
    dq, dk, dw = (torch.zeros_like(x, dtype=work) for x in (q_idx, k_idx, w_idx))
    for queries, keys, visible, logits in _sequences(q, k, *bounds, softmax_scale, causal):
        p = masked_softmax(logits, visible)[0].mean(0)
        of_indexer = q_idx[queries], k_idx[keys], w_idx[queries]
        of_scores = grad[queries, None].to(work) * kl_gradient(p, index_scores(*of_indexer), visible)
        dq[queries], dk[keys], dw[queries] = index_scores_gradient(of_scores, *of_indexer)
    return dq.to(q_idx.dtype), dk.to(k_idx.dtype), dw.to(w_idx.dtype)
