"""Sparse MLA prefill: every query attends to the keys that an indexer selected for it."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.checks import FLOATS, INT32, check_memory, check_number, check_same_device, check_tensor
from dsa.reference.mla.softmax_attention import apply_sink, check_keys_dtype, check_value_dim, gather_attend


@without_autocast
def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out[t] = softmax_j(sm_scale * q[t] . kv[j]) kv[j, :d_v] over the keys j in indices[t].

    q            [s_q, h_q, d] fp32, bf16 or fp16; if fp32, keys may be of any of these
    kv           [s_kv, 1, d] in q's dtype; a value is the first d_v numbers of its key
    indices      [s_q, 1, K] int32; negative or at least s_kv is no key. A key named twice counts twice
    sm_scale     multiplies the logits: a finite number
    d_v          at most d
    attn_sink    [h_q] fp32 or None, any value from -inf to +inf: out is scaled by e^lse / (e^lse + e^sink)
    topk_length  [s_q] int32 or None: only the first topk_length[t] indices count

    Returns out [s_q, h_q, d_v] in q's dtype, max_logits [s_q, h_q] fp32, the largest scaled logit, and lse [s_q, h_q]
    fp32 (natural log); the sink changes neither of the last two. A query without keys has out 0, max_logits -inf and
    lse +inf. NaN in kv reaches only the queries that select it. Everything is fp32 in between.
    Raises TypeError or ValueError for other types, dtypes and shapes. Source: FlashMLA's function of this name.
    """
    check_sparse_fwd(q, kv, indices, sm_scale, d_v, attn_sink, topk_length)
    check_memory("q", q)
    index = indices.squeeze(1)
    if topk_length is not None:
        beyond = torch.arange(index.shape[1], device=index.device) >= topk_length[:, None]
        index = index.masked_fill(beyond, -1)
    out, lse, max_logits = gather_attend(q, kv.squeeze(1), index, sm_scale, d_v)
    if attn_sink is not None:
        out = apply_sink(out, lse, attn_sink)
    return out.to(q.dtype), max_logits, lse


def check_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int,
    attn_sink: torch.Tensor | None,
    topk_length: torch.Tensor | None,
) -> None:
    """The checks of `flash_mla_sparse_fwd`."""
    check_tensor("q", q, FLOATS, ("s_q", "h_q", "d"))
    s_q, h_q, d = q.shape
    check_tensor("kv", kv, FLOATS, ("s_kv", 1, d), "q")
    check_tensor("indices", indices, INT32, (s_q, 1, "K"), "q")
    check_number("sm_scale", sm_scale)
    check_value_dim("d_v", d_v, d)
    if topk_length is not None:
        check_tensor("topk_length", topk_length, INT32, (s_q,), "q")
    if attn_sink is not None:
        check_tensor("attn_sink", attn_sink, (torch.float32,), (h_q,), "q")
    check_keys_dtype(q, kv=kv)
    check_same_device(("q", q), kv=kv, indices=indices, attn_sink=attn_sink, topk_length=topk_length)
