"""Sparse MLA prefill: every query attends to the keys that an indexer selected for it."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.mla.softmax_attention import apply_sink, gather_attend
from dsa.runtime.arguments import F32, ROWS, Arguments, Flag, Int, Number, Tensor
from dsa.runtime.checks import FLOATS, INT32, check_memory

FLASH_MLA_SPARSE_FWD = Arguments(
    q=Tensor("s_q h_q d", FLOATS),
    kv=Tensor("s_kv 1 d", FLOATS, like="q", mixed=True, layout=ROWS),
    indices=Tensor("s_q 1 K", INT32),
    sm_scale=Number(),
    d_v=Int(most="d"),
    attn_sink=Tensor("h_q", F32, optional=True),
    topk_length=Tensor("s_q", INT32, optional=True),
    enable_batch_invariant=Flag(),
)
# The heads of a query are contiguous; queries may be any distance apart.
OUT = {"out": Tensor("s_q h_q d_v", FLOATS, like="q", layout=ROWS, merged=(1, 3))}


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

    Everything is fp32 in between. A query's result does not depend on the others, whatever enable_batch_invariant is. A
    query without keys has out 0, max_logits -inf and lse +inf, and NaN in kv reaches only the queries that select it.
    Arguments as of `dsa.flash_mla_sparse_fwd`; keys of fp32 queries may have any float dtype. Source: FlashMLA's
    function of this name.
    """
    FLASH_MLA_SPARSE_FWD.check(q, kv, indices, sm_scale, d_v, attn_sink, topk_length, enable_batch_invariant)
    check_memory("q", q)
    index = indices.squeeze(1)
    if topk_length is not None:
        beyond = torch.arange(index.shape[1], device=index.device) >= topk_length[:, None]
        index = index.masked_fill(beyond, -1)
    out, lse, max_logits = gather_attend(q, kv.squeeze(1), index, sm_scale, d_v)
    if attn_sink is not None:
        out = apply_sink(out, lse, attn_sink)
    return out.to(q.dtype), max_logits, lse
