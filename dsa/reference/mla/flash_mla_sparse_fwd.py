"""Sparse MLA prefill: every query attends to the keys that an indexer selected for it."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.mla.softmax_attention import apply_sink, gather_attend


@without_autocast
def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    enable_batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out[t] = softmax_j(sm_scale * q[t] . kv[j]) kv[j, :d_v] over the keys j in indices[t].

    Intermediate results are fp32. A query's result does not depend on other queries, with either value of
    `enable_batch_invariant`. A query without keys has out 0, max_logits -inf and lse +inf, and NaN in kv reaches only
    the queries that select it. Arguments as in `dsa.flash_mla_sparse_fwd`, but the reference has no `out`, and accepts
    kv of another float dtype than q's.
    Source: FlashMLA's function of this name.
    """
    index = indices.squeeze(1)
    if topk_length is not None:
        beyond = torch.arange(index.shape[1], device=index.device) >= topk_length[:, None]
        index = index.masked_fill(beyond, -1)
    out, lse, max_logits = gather_attend(q, kv.squeeze(1), index, sm_scale, d_v)
    if attn_sink is not None:
        out = apply_sink(out, lse, attn_sink)
    return out.to(q.dtype), max_logits, lse
