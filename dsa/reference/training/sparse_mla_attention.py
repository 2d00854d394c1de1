"""The sparse stage's attention: to the keys that the indexer selected, with gradients."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.mla.softmax_attention import apply_sink
from dsa.reference.training.masked_softmax import DTYPES, masked_softmax, rows_of, selected, work_dtype
from dsa.runtime.arguments import ROWS, Arguments, Flag, Int, Number, Tensor
from dsa.runtime.checks import INT32, check_memory

SPARSE_MLA_ATTENTION = Arguments(
    q=Tensor("Tq H d", DTYPES),
    kv=Tensor("Tk 1 d", DTYPES, like="q", layout=ROWS),
    indices=Tensor("Tq 1 K", INT32),
    softmax_scale=Number(),
    d_v=Int(most="d"),
    attn_sink=Tensor("H", DTYPES, optional=True),
    deterministic=Flag(optional=True),
)


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

    attn_sink is a logit in the softmax without a value. Gradients of out and lse reach q and kv, those of out
    attn_sink. Arguments as of `dsa.sparse_mla_attention`; `deterministic` is for the kernels.
    Source: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1.1.
    """
    SPARSE_MLA_ATTENTION.check(q, kv, indices, softmax_scale, d_v, attn_sink, deterministic)
    check_memory("q", q)
    work = work_dtype(q)
    index, valid = selected(indices, len(kv))
    rows = rows_of(kv[:, 0].to(work), index)
    logits = softmax_scale * torch.einsum("thd,tjd->htj", q.to(work).contiguous(), rows)
    weights, lse = masked_softmax(logits, valid)
    out = torch.einsum("htj,tjd->thd", weights, rows[..., :d_v])
    if attn_sink is not None:
        out = apply_sink(out, lse.T, attn_sink.to(work))
    return out.to(q.dtype), lse
