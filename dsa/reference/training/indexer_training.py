"""The two stages in which DeepSeek Sparse Attention trains its indexer: the losses and what they are of.

Warm-up: dense attention; the indexer's scores over all keys follow the attention of all heads together. Sparse stage:
attention to the selected keys, and the indexer's scores over these follow it. The target is a constant: the indexer
learns from its loss alone, and the attention from the language model's alone.

Everything is computed in fp32, of float64 inputs in float64, and differentiable.
"""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.checks import (
    FLOATS,
    INT32,
    check_choice,
    check_flag,
    check_int,
    check_memory,
    check_number,
    check_positive,
    check_same_device,
    check_same_dtype,
    check_tensor,
)
from dsa.reference.indexer.topk_indices import topk_indices
from dsa.reference.mla.softmax_attention import check_value_dim

DTYPES = (*FLOATS, torch.float64)
TARGETS = ("sum", "per_head")


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
    target: str = "sum",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention of packed sequences, and how far the indexer's distribution is from it.

    A_h[t, s] = softmax_s(softmax_scale q_h[t] . k[s]);   out_h[t] = sum_s A_h[t, s] v[s]
    I[t, s] = sum_j w_idx[t, j] relu(q_idx_j[t] . k_idx[s])
    "sum": kl[t] = KL(p[t] || softmax_s(I[t])), p[t] = sum_h A_h[t] divided by its sum over s: DeepSeek-V3.2's loss
    "per_head": kl[t, h] = KL(A_h[t] || softmax_s(w_idx[t, h] relu(q_idx_h[t] . k_idx[s]))), for as many index heads

    q             [Tq, H, d]; k [Tk, Hk, d], v [Tk, Hk, dv], H a multiple of Hk: head h attends to head h // (H / Hk)
    q_idx         [Tq, Hi, di]; k_idx [Tk, di]; w_idx [Tq, Hi], of any sign
    cu_seqlens_q  int32 [B + 1], where sequences begin, from 0 to Tq; cu_seqlens_k likewise, to Tk
    max_seqlen_*  no sequence is longer
    causal        a sequence's last query sees all its keys, each one before it one fewer

    Returns out [Tq, H, dv] in q's dtype, lse [H, Tq] (natural log) and kl [Tq] or [Tq, H]. A query without keys has out
    0, lse +inf and kl 0. Gradients of out and lse reach q, k and v; those of kl reach q_idx, k_idx and w_idx only.
    Raises TypeError or ValueError for other types, dtypes and shapes.
    Source: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1.1; "per_head" is tl-dsa-warmup-lightning-indexer's.
    """
    numbers = (max_seqlen_q, max_seqlen_k, softmax_scale)
    check_warmup(q, k, v, q_idx, k_idx, w_idx, cu_seqlens_q, cu_seqlens_k, *numbers, causal, target)
    check_memory("q", q)
    work = _work_dtype(q)
    outs, lses = [q.new_zeros(0, q.shape[1], v.shape[2])], [q.new_zeros(q.shape[1], 0, dtype=work)]
    kls = [q.new_zeros((0,) if target == "sum" else (0, q.shape[1]), dtype=work)]
    for begin_q, end_q, begin_k, end_k in _ranges(cu_seqlens_q, cu_seqlens_k, ("q", q), ("k", k)):
        queries, keys = slice(begin_q, end_q), slice(begin_k, end_k)
        m, n = end_q - begin_q, end_k - begin_k
        visible = torch.ones(m, n, dtype=torch.bool, device=q.device)
        if causal:
            visible = visible.tril(n - m)
        repeat = q.shape[1] // k.shape[1]
        own_k, own_v = (x[keys].to(work).repeat_interleave(repeat, 1) for x in (k, v))
        logits = softmax_scale * torch.einsum("thd,shd->hts", q[queries].to(work), own_k)
        weights, lse = _masked_softmax(logits, visible)
        outs.append(torch.einsum("hts,shd->thd", weights, own_v))
        lses.append(lse)
        dots = torch.relu(torch.einsum("tjd,sd->jts", q_idx[queries].to(work), k_idx[keys].to(work)))
        scores = dots * w_idx[queries].to(work).T[..., None]
        if target == "sum":
            kls.append(_kl(weights.detach().mean(0), scores.sum(0), visible))
        else:
            kls.append(_kl(weights.detach(), scores, visible).T)
    return torch.cat(outs).to(q.dtype), torch.cat(lses, 1), torch.cat(kls)


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

    Arguments as of `indexer_warmup_attention`, and what a query sees, too. Scores are not quantised.

    Returns int32 [Tq, 1, top_k]: rows of k_idx, in their order, then -1 for the keys that there are not. Of equal
    scores the lowest index is picked; NaN never. No gradients. Raises TypeError or ValueError for other types, dtypes
    and shapes.
    """
    check_indexer_topk(q_idx, k_idx, w_idx, top_k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal)
    check_memory("q_idx", q_idx)
    picks = [torch.full((0, top_k), -1, dtype=torch.int32, device=q_idx.device)]
    work = _work_dtype(q_idx)
    with torch.no_grad():
        for begin_q, end_q, begin_k, end_k in _ranges(cu_seqlens_q, cu_seqlens_k, ("q_idx", q_idx), ("k_idx", k_idx)):
            queries, keys = slice(begin_q, end_q), slice(begin_k, end_k)
            m, n = end_q - begin_q, end_k - begin_k
            dots = torch.relu(torch.einsum("tjd,sd->jts", q_idx[queries].to(work), k_idx[keys].to(work)))
            scores = (dots * w_idx[queries].to(work).T[..., None]).sum(0).float()
            lengths = torch.full((m,), n, dtype=torch.int32, device=q_idx.device)
            if causal:
                lengths = (n - m + 1 + torch.arange(m, device=q_idx.device)).clamp(0, n).int()
            own = topk_indices(scores, top_k, lengths=lengths)
            picks.append(torch.where(own < 0, own, own + begin_k))
    return torch.cat(picks)[:, None]


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

    q [Tq, H, d]; kv [Tk, 1, d]; indices int32 [Tq, 1, K], below 0 or from Tk on is no key; attn_sink [H] or None: a
    logit in the softmax without a value, out is scaled by e^lse / (e^lse + e^sink); deterministic is for the kernels.

    Returns out [Tq, H, d_v] in q's dtype and lse [H, Tq], without the sink; out 0 and lse +inf without keys. Gradients
    of both reach q and kv, those of out attn_sink. Raises TypeError or ValueError for other types, dtypes and shapes.
    """
    check_sparse_attention(q, kv, indices, softmax_scale, d_v, attn_sink, deterministic)
    check_memory("q", q)
    work = _work_dtype(q)
    index, valid = _selected(indices, len(kv))
    rows = _rows(kv[:, 0].to(work), index)
    logits = softmax_scale * torch.einsum("thd,tjd->htj", q.to(work), rows)
    weights, lse = _masked_softmax(logits, valid)
    out = torch.einsum("htj,tjd->thd", weights, rows[..., :d_v])
    if attn_sink is not None:
        share = torch.sigmoid(lse.T - attn_sink.to(work))
        out = out * share.masked_fill(lse.T == torch.inf, 0.0)[..., None]
    return out.to(q.dtype), lse


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

    q, kv, indices  as of `sparse_mla_attention`
    q_idx           [Tq, Hi, di]; k_idx [Tk, di]; w_idx [Tq, Hi]
    lse             [H, Tq] of each head's whole softmax; None: of the selected keys alone, so that every head counts
                    the same (V3.2). V4's has its window and its sink in it: a head counts by what it gives these keys
    deterministic   of a GPU's kernels

    Returns kl [Tq], 0 for a query without keys. Gradients reach q_idx, k_idx and w_idx only.
    Raises TypeError or ValueError for other types, dtypes and shapes.
    Source: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1.1.
    """
    check_sparse_loss(q, kv, q_idx, k_idx, w_idx, indices, softmax_scale, lse, deterministic)
    check_memory("q", q)
    work = _work_dtype(q)
    index, valid = _selected(indices, len(kv))
    with torch.no_grad():
        logits = softmax_scale * torch.einsum("thd,tjd->htj", q.to(work), _rows(kv[:, 0].to(work), index))
        own_weights, own_lse = _masked_softmax(logits, valid)
        if lse is not None:
            # Each head's share of its whole softmax, in logs: all of them may be tiny.
            share = (own_lse - lse.to(work)).masked_fill(own_lse == torch.inf, 0.0)
            own_weights = own_weights * torch.softmax(share, 0)[..., None]
        p = own_weights.sum(0)
        p = p / p.sum(-1, keepdim=True).clamp(min=torch.finfo(work).tiny)
    dots = torch.relu(torch.einsum("tid,tjd->itj", q_idx.to(work), _rows(k_idx.to(work), index)))
    return _kl(p, (dots * w_idx.to(work).T[..., None]).sum(0), valid)


def _work_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _masked_softmax(logits: torch.Tensor, visible: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Over the visible of the last dimension, zeros elsewhere; and the LSE, +inf where nothing is visible."""
    some = visible.any(-1)
    # What is nowhere visible is left as it is: a row of -inf has a gradient of NaN.
    masked = logits.masked_fill(~visible & some[..., None], -torch.inf)
    weights = masked.softmax(-1).masked_fill(~some[..., None], 0.0)
    return weights, masked.logsumexp(-1).masked_fill(~some, torch.inf) if logits.shape[-1] else logits.sum(
        -1
    ) + torch.inf


def _kl(p: torch.Tensor, scores: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """KL(p || softmax(scores)) over the visible of the last dimension; 0 where nothing is."""
    if scores.shape[-1] == 0:
        return scores.sum(-1)
    some = visible.any(-1)
    log_q = scores.masked_fill(~visible & some[..., None], -torch.inf).log_softmax(-1).masked_fill(~visible, 0.0)
    return (torch.special.xlogy(p, p) - p * log_q).sum(-1)


def _selected(indices: torch.Tensor, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows [Tq, K], `keys` where there is none, and where there are)."""
    index = indices[:, 0].long()
    valid = (index >= 0) & (index < keys)
    return index.masked_fill(~valid, keys), valid


def _rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows of x, and zeros for the one behind its last."""
    return torch.nn.functional.pad(x, (0, 0, 0, 1))[index]


def check_warmup(
    q, k, v, q_idx, k_idx, w_idx, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, target
) -> None:
    """The checks of `indexer_warmup_attention`."""
    check_tensor("q", q, DTYPES, ("Tq", "H", "d"))
    tokens, heads, dim = q.shape
    check_tensor("k", k, DTYPES, ("Tk", "Hk", dim), "q")
    keys, key_heads, _ = k.shape
    check_tensor("v", v, DTYPES, (keys, key_heads, "dv"), "k")
    if heads == 0:  # their mean is what the indexer is to follow
        raise ValueError(f"q: must have at least one head, got shape {list(q.shape)}")
    if key_heads == 0 or heads % key_heads:
        raise ValueError(f"k: its {key_heads} heads must divide q's {heads}")
    check_indexer(q_idx, k_idx, w_idx, tokens, keys, "q and k")
    check_same_dtype(("q", q), k=k, v=v, q_idx=q_idx)
    _check_weights(q_idx, w_idx)
    check_longest(max_seqlen_q, max_seqlen_k, causal)
    check_number("softmax_scale", softmax_scale)
    check_choice("target", target, TARGETS)
    if target == "per_head" and q_idx.shape[1] != heads:
        raise ValueError(f"q_idx: target 'per_head' needs q's {heads} heads, got {q_idx.shape[1]}")
    check_same_device(("q", q), k=k, v=v, q_idx=q_idx)
    check_bounds(cu_seqlens_q, cu_seqlens_k, ("q", q), ("k", k))


def check_indexer_topk(
    q_idx, k_idx, w_idx, top_k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal
) -> None:
    """The checks of `indexer_topk`."""
    check_tensor("q_idx", q_idx, DTYPES, ("Tq", "Hi", "di"))
    check_tensor("k_idx", k_idx, DTYPES, ("Tk", q_idx.shape[2]), "q_idx")
    check_indexer(q_idx, k_idx, w_idx, len(q_idx), len(k_idx), "q_idx")
    _check_weights(q_idx, w_idx)
    check_positive("top_k", top_k)
    check_longest(max_seqlen_q, max_seqlen_k, causal)
    check_bounds(cu_seqlens_q, cu_seqlens_k, ("q_idx", q_idx), ("k_idx", k_idx))


def check_longest(max_seqlen_q: int, max_seqlen_k: int, causal: bool) -> None:
    check_int("max_seqlen_q", max_seqlen_q, 0)
    check_int("max_seqlen_k", max_seqlen_k, 0)
    check_flag("causal", causal)


Named = tuple[str, torch.Tensor]


def check_bounds(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, queries: Named, keys: Named) -> None:
    """Where packed sequences begin in the rows of `queries` and `keys`; values are looked at on a CPU only."""
    check_tensor("cu_seqlens_q", cu_seqlens_q, INT32, ("B + 1",))
    check_tensor("cu_seqlens_k", cu_seqlens_k, INT32, tuple(cu_seqlens_q.shape), "cu_seqlens_q")
    check_same_device(queries, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    if cu_seqlens_q.device.type == "cpu":
        _ranges(cu_seqlens_q, cu_seqlens_k, queries, keys)


def _ascending(name: str, x: torch.Tensor, rows: Named) -> list[int]:
    numbers, end = x.tolist(), len(rows[1])
    if not numbers or numbers[0] != 0 or numbers[-1] != end or numbers != sorted(numbers):
        raise ValueError(f"{name}: must ascend from 0 to {end}, got {numbers} (sizes as of {rows[0]})")
    return numbers


def _ranges(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, queries: Named, keys: Named):
    """(first query, end, first key, end) of each sequence."""
    q, k = _ascending("cu_seqlens_q", cu_seqlens_q, queries), _ascending("cu_seqlens_k", cu_seqlens_k, keys)
    return zip(q, q[1:], k, k[1:])


def check_indexer(q_idx, k_idx, w_idx, tokens: int, keys: int, sizes_of: str) -> None:
    """The indexer's tensors for so many queries and keys, on one device; w_idx of any float dtype."""
    check_tensor("q_idx", q_idx, DTYPES, (tokens, "Hi", "di"), sizes_of)
    check_tensor("k_idx", k_idx, DTYPES, (keys, q_idx.shape[2]), f"{sizes_of} and q_idx")
    check_tensor("w_idx", w_idx, DTYPES, (tokens, q_idx.shape[1]), "q_idx")
    check_same_dtype(("q_idx", q_idx), k_idx=k_idx)
    check_same_device(("q_idx", q_idx), k_idx=k_idx, w_idx=w_idx)


def _check_weights(q_idx: torch.Tensor, w_idx: torch.Tensor) -> None:
    if w_idx.dtype not in (torch.float32, q_idx.dtype):
        own, got = (str(x.dtype).removeprefix("torch.") for x in (q_idx, w_idx))
        raise ValueError(f"w_idx: dtype must be float32 or q_idx's {own}, got {got}")


def check_sparse(q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor) -> None:
    """What selected keys have to be."""
    check_tensor("q", q, DTYPES, ("Tq", "H", "d"))
    check_tensor("kv", kv, DTYPES, ("Tk", 1, q.shape[2]), "q")
    check_tensor("indices", indices, INT32, (len(q), 1, "K"), "q")
    check_same_dtype(("q", q), kv=kv)
    check_same_device(("q", q), kv=kv, indices=indices)


def check_sparse_attention(q, kv, indices, softmax_scale, d_v, attn_sink, deterministic) -> None:
    """The checks of `sparse_mla_attention`."""
    check_sparse(q, kv, indices)
    check_number("softmax_scale", softmax_scale)
    check_value_dim("d_v", d_v, q.shape[2])
    if deterministic is not None:
        check_flag("deterministic", deterministic)
    if attn_sink is not None:
        check_tensor("attn_sink", attn_sink, DTYPES, (q.shape[1],), "q")
        check_same_device(("q", q), attn_sink=attn_sink)


def check_sparse_loss(q, kv, q_idx, k_idx, w_idx, indices, softmax_scale, lse, deterministic) -> None:
    """The checks of `sparse_indexer_loss`."""
    check_sparse(q, kv, indices)
    check_indexer(q_idx, k_idx, w_idx, len(q), len(kv), "q and kv")
    check_same_dtype(("q", q), q_idx=q_idx)
    check_number("softmax_scale", softmax_scale)
    if deterministic is not None:
        check_flag("deterministic", deterministic)
    if lse is not None:
        check_tensor("lse", lse, DTYPES, (q.shape[1], len(q)), "q")
    check_same_device(("q", q), q_idx=q_idx, lse=lse)
