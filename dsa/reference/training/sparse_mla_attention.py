"""The attention of the sparse stage of training, to the keys that the indexer selected, and its gradients."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.mla.softmax_attention import apply_sink
from dsa.reference.training.masked_softmax import masked_softmax, rows_of, selected, sum_of_rows, work_dtype


@without_autocast
def sparse_mla_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    softmax_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    deterministic: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out[t] = softmax_j(softmax_scale q[t] . kv[j]) kv[j, :d_v] over the keys j in indices[t], with gradients.

    attn_sink is one more logit per head in out's softmax, with no value vector; lse does not include it. Gradients of
    out reach q, kv and attn_sink; those of lse reach q and kv. `deterministic` affects only the kernels. Arguments as
    in `dsa.sparse_mla_attention`.
    Source: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1.1.
    """
    index, valid = selected(indices, len(kv))
    rows, logits = _logits(q, kv, index, softmax_scale)
    weights, lse = masked_softmax(logits, valid)
    out = torch.einsum("htj,tjd->thd", weights, rows[..., :d_v])
    if attn_sink is not None:
        out = apply_sink(out, lse.T, attn_sink.to(out.dtype))
    return out.to(q.dtype), lse


@without_autocast
def sparse_mla_attention_gradient(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    softmax_scale: float,
    attn_sink: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    grad_out: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the gradients of q, kv and attn_sink. grad_out and grad_lse are the gradients of out and lse; None counts
    as zeros.

    With A = exp(logits - lse), f = e^lse / (e^lse + e^sink), g = grad_out, delta = g . out: the gradient of the scaled
    logits is A (f (g . v - delta) + grad_lse), and the gradient of the sink is -sum_t (1 - f) delta. Without a sink f
    is 1, and None is returned as the sink's gradient.
    """
    work, d_v = work_dtype(q), out.shape[2]
    index, valid = selected(indices, len(kv))
    rows, logits = _logits(q, kv, index, softmax_scale)
    lse = lse.to(work).masked_fill(lse == torch.inf, 0.0)
    weights = (logits - lse[..., None]).exp().masked_fill(~valid, 0.0)
    grad = torch.zeros_like(out, dtype=work) if grad_out is None else grad_out.to(work)
    delta = (grad * out.to(work)).sum(-1).T
    share, dsink = torch.ones_like(delta), None
    if attn_sink is not None:
        over_sink = lse - attn_sink.to(work)[:, None]
        share = torch.sigmoid(over_sink)
        dsink = (-torch.sigmoid(-over_sink) * delta).sum(1).to(attn_sink.dtype)
    of_weights = share[..., None] * (torch.einsum("thd,tjd->htj", grad, rows[..., :d_v]) - delta[..., None])
    if grad_lse is not None:
        of_weights = of_weights + grad_lse.to(work)[..., None]
    of_logits = softmax_scale * weights * of_weights
    of_rows = torch.einsum("htj,thd->tjd", of_logits, q.to(work))
    of_rows[..., :d_v] += torch.einsum("htj,thd->tjd", weights * share[..., None], grad)
    dq = torch.einsum("htj,tjd->thd", of_logits, rows)
    dkv = sum_of_rows(of_rows, index, len(kv))[:, None]
    return dq.to(q.dtype).contiguous(), dkv.to(kv.dtype), dsink


def _logits(
    q: torch.Tensor, kv: torch.Tensor, index: torch.Tensor, softmax_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (the rows of kv that `index` names, [Tq, K, d]; logits [H, Tq, K])."""
    rows = rows_of(kv[:, 0].to(work_dtype(q)), index)
    return rows, softmax_scale * torch.einsum("thd,tjd->htj", q.to(rows.dtype).contiguous(), rows)
