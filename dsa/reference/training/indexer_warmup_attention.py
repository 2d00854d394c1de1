"""The warm-up, in which DeepSeek Sparse Attention's indexer begins to learn: dense attention, and the loss by which the
indexer's scores over all keys follow it.

The target is a constant: the indexer learns from its loss alone, and the attention from the language model's alone.
"""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.indexer.index_scores import index_scores
from dsa.reference.training.masked_softmax import DTYPES, kl_divergence, masked_softmax, work_dtype
from dsa.reference.training.packed_sequences import SEQUENCES, check_bounds, sequence_ranges
from dsa.runtime.arguments import Arguments, Flag, Number, Tensor
from dsa.runtime.checks import check_memory


def _check_heads_and_bounds(
    q: torch.Tensor,
    k: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
) -> None:
    heads, key_heads = q.shape[1], k.shape[1]
    if heads == 0:  # their mean is what the indexer is to follow
        raise ValueError(f"q: must have at least one head, got shape {list(q.shape)}")
    if key_heads == 0 or heads % key_heads:
        raise ValueError(f"k: its {key_heads} heads must divide q's {heads}")
    check_bounds(cu_seqlens_q, cu_seqlens_k, ("q", q), ("k", k))


INDEXER_WARMUP_ATTENTION = Arguments(
    rule=_check_heads_and_bounds,
    q=Tensor("Tq H d", DTYPES),
    k=Tensor("Tk Hk d", DTYPES, like="q"),
    v=Tensor("Tk Hk dv", DTYPES, like="q"),
    q_idx=Tensor("Tq Hi di", DTYPES, like="q"),
    k_idx=Tensor("Tk di", DTYPES, like="q_idx"),
    w_idx=Tensor("Tq Hi", DTYPES, like="q_idx", besides=(torch.float32,)),
    **SEQUENCES,
    softmax_scale=Number(),
    causal=Flag(),
)


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
    """Attention of packed sequences, and how far the indexer's distribution is from it.

    A_h[t, s] = softmax_s(softmax_scale q_h[t] . k[s]);   out_h[t] = sum_s A_h[t, s] v[s]
    I[t, s] = sum_j w_idx[t, j] relu(q_idx_j[t] . k_idx[s])
    kl[t] = KL(p[t] || softmax_s(I[t])), p[t] = sum_h A_h[t] divided by its sum over s

    Returns out [Tq, H, dv] in q's dtype, lse [H, Tq] (natural log) and kl [Tq]. A query without keys has out 0, lse
    +inf and kl 0. Gradients of out and lse reach q, k and v; those of kl reach q_idx, k_idx and w_idx only.
    Arguments as of `dsa.indexer_warmup_attention`.
    Source: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1.1.
    """
    tensors = (q, k, v, q_idx, k_idx, w_idx, cu_seqlens_q, cu_seqlens_k)
    numbers = (max_seqlen_q, max_seqlen_k, softmax_scale, causal)
    INDEXER_WARMUP_ATTENTION.check(*tensors, *numbers)
    check_memory("q", q)
    work = work_dtype(q)
    outs, lses = [q.new_zeros(0, q.shape[1], v.shape[2])], [q.new_zeros(q.shape[1], 0, dtype=work)]
    kls = [q.new_zeros(0, dtype=work)]
    for begin_q, end_q, begin_k, end_k in sequence_ranges(cu_seqlens_q, cu_seqlens_k, ("q", q), ("k", k)):
        queries, keys = slice(begin_q, end_q), slice(begin_k, end_k)
        m, n = end_q - begin_q, end_k - begin_k
        visible = torch.ones(m, n, dtype=torch.bool, device=q.device)
        if causal:
            visible = visible.tril(n - m)
        repeat = q.shape[1] // k.shape[1]
        own_k, own_v = (x[keys].to(work).repeat_interleave(repeat, 1) for x in (k, v))
        logits = softmax_scale * torch.einsum("thd,shd->hts", q[queries].to(work).contiguous(), own_k)
        weights, lse = masked_softmax(logits, visible)
        outs.append(torch.einsum("hts,shd->thd", weights, own_v))
        lses.append(lse)
        scores = index_scores(q_idx[queries], k_idx[keys], w_idx[queries])
        kls.append(kl_divergence(weights.detach().mean(0), scores, visible))
    return torch.cat(outs).to(q.dtype), torch.cat(lses, 1), torch.cat(kls)
