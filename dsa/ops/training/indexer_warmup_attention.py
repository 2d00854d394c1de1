"""The indexer's warm-up: dense attention, the KL divergence of the indexer's distribution from it, and the gradients of
both."""

from collections.abc import Callable
from typing import Any

import torch

from dsa.kernels.training.limits import DENSE_CHANNELS
from dsa.ops.training._packed_attention import (
    ABSORBED,
    attention_backward,
    attention_forward,
    empty_values_gradient,
)
from dsa.ops.training._uncovered_rows import fill_uncovered
from dsa.ops.training._warmup_sum import (
    INDEXER_LIMITS,
    Indexer,
    Plan,
    empty_plan,
    key_tiles_of,
    losses,
    make_plan,
    padded_heads,
    workspace,
)
from dsa.ops.training.indexer_topk import SEQUENCES
from dsa.ops.training.sparse_mla_attention import DTYPES
from dsa.reference.training import indexer_warmup_attention as reference
from dsa.runtime.declare import (
    F32,
    INT32,
    POSITIVE,
    Arguments,
    Flag,
    Gradient,
    Int,
    Number,
    Tensor,
    at_least,
    op,
    wants_gradient,
)

__all__ = ["indexer_warmup_attention"]

CHANNELS = *DENSE_CHANNELS, ABSORBED


def _check_heads(q: torch.Tensor, k: torch.Tensor) -> None:
    heads, key_heads = q.shape[1], k.shape[1]
    if key_heads == 0 or heads % key_heads:
        raise ValueError(f"k: its {key_heads} heads must divide q's {heads}")


_ATTENTION = {
    "q": Tensor("Tq H d", DTYPES),
    "k": Tensor("Tk Hk d", DTYPES, like="q"),
    "v": Tensor("Tk Hk dv", DTYPES, like="q"),
}
_INDEXER = {
    "q_idx": Tensor("Tq Hi di", DTYPES, like="q"),
    "k_idx": Tensor("Tk di", DTYPES, like="q_idx"),
    "w_idx": Tensor("Tq Hi", DTYPES, like="q_idx", besides=F32),
}
_KIND = {"softmax_scale": Number(), "causal": Flag()}
INDEXER_WARMUP_ATTENTION = Arguments(
    limits={"H": at_least(1)},  # the loss's target is a mean over the heads
    rule=_check_heads,
    **_ATTENTION,
    **_INDEXER,
    **SEQUENCES,
    **_KIND,
    keep=Flag(),
)
_BOUNDS = {"bounds": Tensor("2 B+1", INT32), "max_seqlen_q": Int(least=0), "max_seqlen_k": Int(least=0)}
WARMUP_ATTENTION_GRADIENT = Arguments(
    **_ATTENTION,
    grad=Tensor("Tq H dv", DTYPES),
    out=Tensor("Tq H dv", DTYPES, like="q"),
    lse=Tensor("H Tq", DTYPES),
    **_BOUNDS,
    **_KIND,
)
WARMUP_LOSS_GRADIENT = Arguments(
    **_ATTENTION,
    **_INDEXER,
    grad=Tensor("Tq", DTYPES),
    lse=Tensor("H Tq", DTYPES),
    dq=Tensor("Tq padded di", DTYPES, like="q_idx"),
    dk=Tensor("Tk di", F32),
    dw=Tensor("Tq padded", F32),
    q_tiles=Tensor("S 8", INT32),
    key_tiles=Tensor("S+1", INT32),
    **_BOUNDS,
    **_KIND,
    of_keys=Flag(),
)
T = torch.Tensor
Three = tuple[T, T, T]
Results = tuple[T, T, T, T, T, T, T, T, T]


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
    """Attention of packed sequences, and per query the KL divergence of the indexer's distribution from the attention.

    A_h[t, s] = softmax_s(softmax_scale q_h[t] . k[s]);   out_h[t] = sum_s A_h[t, s] v[s]
    I[t, s] = sum_j w_idx[t, j] relu(q_idx_j[t] . k_idx[s])
    kl[t] = KL(p[t] || softmax_s(I[t])), p[t] = sum_h A_h[t] divided by its sum over s

    q             [Tq, H, d]; k [Tk, Hk, d], v [Tk, Hk, dv], H a multiple of Hk: head h attends to key head h // (H /
                  Hk). k and v are in q's dtype
    q_idx         [Tq, Hi, di] and k_idx [Tk, di] in q's dtype; w_idx [Tq, Hi] in q's dtype or fp32, of any sign
    cu_seqlens_q  int32 [B + 1], the boundaries of sequences in the queries, from 0 to Tq; cu_seqlens_k likewise for the
                  keys, to Tk
    max_seqlen_*  at least the length of the longest sequence. On Hopper a query that sees more keys than max_seqlen_k
                  rounded up to a multiple of 128 has a NaN loss. In a sequence longer than max_seqlen_*, the rows after
                  this length get a gradient of 0: rows of k and v always, rows of q unless (d, dv) is (576, 512)
    causal        True: a sequence's last query sees all keys of the sequence, and each earlier query sees one key fewer
                  than the query after it.
                  False: every query sees all keys of its sequence

    Returns out [Tq, H, dv] in q's dtype, lse [H, Tq] fp32 (natural log) and kl fp32 [Tq]. A query without keys has out
    0, lse +inf and kl 0. The gradient of out flows to q, k and v; the gradient of kl flows only to q_idx, k_idx and
    w_idx.
    Raises TypeError or ValueError for other types, dtypes, shapes and devices, and if the reference runs, for
    cu_seqlens that do not ascend from 0 to the end. The kernels replace a boundary that is outside the tensor, or below
    an earlier boundary, by the boundary before it (the first boundary by 0). Rows that belong to no sequence are
    treated as queries without keys, with gradients of 0.
    On Hopper: bf16, w_idx also fp32; other dtypes run the PyTorch reference, with a warning. (d, dv) is (64, 64), (128,
    128), (192, 128) or (576, 512); with (576, 512), Hk is 1, v is a view of k, and k's gradient includes v's. di is 64
    or 128. Up to 64 index heads (8, 16, 32 and 64 without padding).
    No matrix of all queries by all keys is stored: the workspace contains a chunk of queries by all keys, at most 15/16
    of the inputs' bytes or 192 MiB, whichever is more, unless 128 queries need more. If the indexer needs gradients,
    the forward pass computes them together with the loss, for an upstream gradient of 1 for all tokens, and keeps them.
    The backward pass multiplies them by the upstream gradients, and computes k_idx's gradient again if the upstream
    gradients of tokens differ. After `kl.sum()` the host knows from the stride that the upstream gradients are equal.
    Otherwise, as after `kl.mean()`, only the device knows this, so the host launches kernels that do nothing for equal
    upstream gradients. The gradients of q, k and v are those of PyTorch's flash attention, or for (576, 512) those of
    `sparse_mla_attention`. Their sums have no fixed order, except the sum of q's gradient at (576, 512). Everything
    else is deterministic. At (576, 512) the sums of k's gradient also have a fixed order if
    torch.are_deterministic_algorithms_enabled() when the gradient is computed; this takes 2304 * max_seqlen_k bytes
    more per SM. CUDA-graph safe, no host synchronisation.
    On Hopper and under torch.compile lse has no gradient, and a second backward pass raises RuntimeError.
    Source: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1.1.
    """
    keep = torch.is_grad_enabled() and wants_gradient(q_idx, k_idx, w_idx)
    sequences = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    out, lse, kl, *_ = _indexer_warmup_attention(
        *(q, k, v, q_idx, k_idx, w_idx), *sequences, *(softmax_scale, causal, keep)
    )
    return out, lse, kl


def _check_view(k: torch.Tensor, v: torch.Tensor) -> None:
    """Check that in absorbed attention v is a view of k. The check runs in every launch, because a call's signature
    does not contain addresses."""
    if (k.shape[2], v.shape[2]) == ABSORBED:
        if len(v) and (v.data_ptr() != k.data_ptr() or v.stride(0) != k.stride(0)):
            raise ValueError(f"v: the kernel takes k[..., :{ABSORBED[1]}] for keys of {ABSORBED[0]} channels")


def _attention_gradient_results(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Three:
    """Allocate the gradients of q, k and v, with the strides of PyTorch's flash attention. In absorbed attention k's
    gradient includes v's, and v's is an empty tensor."""
    if (q.shape[2], v.shape[2]) == ABSORBED:
        return torch.empty_like(q), k.new_empty(k.shape), v.new_empty(0)
    return torch.empty_like(q), torch.empty_like(k), empty_values_gradient(q, v)


def _reference_attention_gradient(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grad: torch.Tensor,
    out: torch.Tensor,
    bounds: torch.Tensor,
    softmax_scale: float,
    causal: bool,
) -> Three:
    _check_view(k, v)
    found = reference.warmup_attention_gradient(grad, q, k, v, out, bounds, softmax_scale, causal)
    dq, dk, dv = _attention_gradient_results(q, k, v)
    dq.copy_(found[0])
    dk.copy_(found[1])
    if dv.dim() == 1:
        dk[..., : v.shape[2]] += found[2]
    else:
        dv.copy_(found[2])
    return dq, dk, dv


@op(
    arguments=WARMUP_ATTENTION_GRADIENT,
    reference=_reference_attention_gradient,
    results=_attention_gradient_results,
    recorded=False,
    public="indexer_warmup_attention",
)
def _indexer_warmup_attention_gradient(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grad: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    bounds: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
) -> Three:
    sequences = *bounds.unbind(), max_seqlen_q, max_seqlen_k
    dq, dk, dv = attention_backward(grad, q, k, v, out, lse, sequences, float(softmax_scale), causal)
    return dq, dk, v.new_empty(0) if dv is None else dv


def _loss_gradient_results(q_idx: torch.Tensor, k_idx: torch.Tensor, w_idx: torch.Tensor) -> Three:
    return tuple(x.new_empty(x.shape) for x in (q_idx, k_idx, w_idx))


@op(
    arguments=WARMUP_LOSS_GRADIENT,
    reference=reference.warmup_loss_gradient,
    results=_loss_gradient_results,
    recorded=False,
    public="indexer_warmup_attention",
)
def _indexer_warmup_loss_gradient(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_idx: torch.Tensor,
    k_idx: torch.Tensor,
    w_idx: torch.Tensor,
    grad: torch.Tensor,
    lse: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dw: torch.Tensor,
    q_tiles: torch.Tensor,
    key_tiles: torch.Tensor,
    bounds: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    of_keys: bool,
) -> Three:
    """Return the gradients of q_idx, k_idx and w_idx, given the gradient of kl. dq, dk and dw are the gradients that
    the forward pass kept, for an upstream gradient of 1 and with padded heads. Without `of_keys` the caller does not
    use k_idx's gradient."""
    heads = q_idx.shape[1]
    dq_idx = _scaled(dq[:, :heads], grad[:, None, None], q_idx.dtype)
    dw_idx = _scaled(dw[:, :heads], grad[:, None], w_idx.dtype)
    if not len(q):
        return dq_idx, k_idx.new_zeros(k_idx.shape), dw_idx
    # Scaling the kept sum over tokens is right only if all upstream gradients are equal, as after `kl.sum()`.
    dk_idx = _scaled(dk, grad[0], k_idx.dtype)
    if of_keys and grad.stride(0) != 0:
        # The host does not know whether the upstream gradients differ, so the kernels are always launched. If the
        # gradients are equal, `only_if` makes a plan without work.
        differ = (grad != grad[0]).any()
        plan = Plan(q_tiles, key_tiles, key_tiles_of(max_seqlen_k)).only_if(differ)
        indexer, upstream = Indexer.of(q_idx, k_idx, w_idx), grad.float().contiguous()
        budget = workspace(q, k, v, q_idx, k_idx, w_idx)
        _, again = losses(q, k, lse, float(softmax_scale), indexer, plan, upstream, budget, False, True)
        dk_idx = torch.where(differ, again[2].to(k_idx.dtype), dk_idx)
    return dq_idx, dk_idx, dw_idx


def _scaled(x: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.mul(x, factor, out=x.new_empty(x.shape, dtype=dtype))


def _check_channels(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    if (q.shape[2], v.shape[2]) not in CHANNELS:
        raise ValueError(
            f"q, v: the kernel takes channels (d, dv) of {', '.join(map(str, CHANNELS))}, got "
            f"{(q.shape[2], v.shape[2])}"
        )
    if (q.shape[2], v.shape[2]) == ABSORBED and k.shape[1] != 1:
        raise ValueError(f"k: the kernel takes one head of {ABSORBED[0]} channels, got {k.shape[1]}")


def _save(ctx: Any, arguments: tuple[Any, ...], results: tuple[torch.Tensor, ...]) -> None:
    *tensors, _, _, max_seqlen_q, max_seqlen_k, scale, causal, _ = arguments
    out, lse, _, *kept = results
    ctx.numbers = max_seqlen_q, max_seqlen_k, scale, causal
    ctx.mark_non_differentiable(lse, *kept)
    ctx.save_for_backward(*tensors, out, lse, *kept)


def _backward(
    ctx: Any, run: Callable[..., Any], grad_out: torch.Tensor | None, _: None, grad_kl: torch.Tensor | None, *__: None
) -> tuple[torch.Tensor | None, ...]:
    q, k, v, q_idx, k_idx, w_idx, out, lse, *kept, bounds = ctx.saved_tensors
    of_attention = of_indexer = None, None, None
    if grad_out is not None and any(ctx.needs_input_grad[:3]):
        saved = q, k, v, grad_out, out, lse, bounds
        *of_attention, dv = run(_indexer_warmup_attention_gradient, *saved, *ctx.numbers)
        of_attention = *of_attention, dv if dv.dim() == v.dim() else None
    wanted = ctx.needs_input_grad[3:6]
    if grad_kl is not None and any(wanted):
        saved = q, k, v, q_idx, k_idx, w_idx, grad_kl, lse, *kept, bounds
        found = run(_indexer_warmup_loss_gradient, *saved, *ctx.numbers, wanted[1])
        of_indexer = (x if own else None for x, own in zip(found, wanted))
    return *of_attention, *of_indexer, None, None, None, None, None, None, None


def _results(
    q: torch.Tensor,
    v: torch.Tensor,
    q_idx: torch.Tensor,
    k_idx: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    keep: bool,
) -> Results:
    tokens, heads = q.shape[:2]
    work = torch.float64 if q.dtype == torch.float64 else torch.float32
    out, lse = q.new_empty(tokens, heads, v.shape[2]), q.new_empty(heads, tokens, dtype=work)
    kl, kept = q.new_empty(tokens, dtype=work), _kept(q_idx, k_idx, keep)
    bounds = cu_seqlens_q.new_empty(2, len(cu_seqlens_q))
    return out, lse, kl, *kept, *empty_plan(cu_seqlens_q, tokens), bounds


def _kept(q_idx: torch.Tensor, k_idx: torch.Tensor, keep: bool) -> Three:
    """Allocate the kept gradients of q_idx, k_idx and w_idx, with padded heads."""
    if not keep:
        return q_idx.new_empty(0), *(q_idx.new_empty(0, dtype=torch.float32) for _ in range(2))
    tokens, heads, channels = q_idx.shape
    heads = padded_heads(heads)
    fp32 = {"dtype": torch.float32, "device": q_idx.device}
    dk, dw = torch.empty(k_idx.shape, **fp32), torch.empty(tokens, heads, **fp32)
    return q_idx.new_empty(tokens, heads, channels), dk, dw


def _reference(
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
    causal: bool,
    keep: bool,
) -> Results:
    """Run the reference. The tensors that the kernels keep are zeros: the reference's backward pass needs only the
    boundaries."""
    sequences = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    out, lse, kl = reference.indexer_warmup_attention(
        *(q, k, v, q_idx, k_idx, w_idx), *sequences, *(softmax_scale, causal)
    )
    kept = (x.zero_() for x in _results(q, v, q_idx, k_idx, cu_seqlens_q, keep)[3:-1])
    return out.contiguous(), lse, kl, *kept, torch.stack((cu_seqlens_q, cu_seqlens_k))


@op(
    arguments=INDEXER_WARMUP_ATTENTION,
    reference=_reference,
    results=_results,
    limits=INDEXER_LIMITS | {"softmax_scale": POSITIVE},
    rule=_check_channels,
    gradient=Gradient(_save, _backward),
    recorded=False,
    dtypes=(torch.bfloat16,),
)
def _indexer_warmup_attention(
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
    causal: bool,
    keep: bool,
) -> Results:
    """Return out, lse, kl, and for the backward pass dq, dk, dw (`_kept`), q_tiles, key_tiles (`Plan`) and the bounds
    [2, B + 1].

    keep  whether the gradients of q_idx, k_idx and w_idx are computed, for upstream gradients of 1
    """
    _check_view(k, v)
    scale, longest = float(softmax_scale), (max_seqlen_q, max_seqlen_k)
    sequences = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous(), *longest
    plan, bounds = make_plan(sequences, len(q), len(k), causal)
    bound_q, bound_k = bounds.unbind()  # cu_seqlens, corrected so that they ascend and stay inside q and k
    out, lse = attention_forward(q, k, v, (bound_q, bound_k, *longest), scale, causal)
    ones = q.new_ones(len(q), dtype=torch.float32)
    indexer, budget = Indexer.of(q_idx, k_idx, w_idx), workspace(q, k, v, q_idx, k_idx, w_idx)
    kl, (dq, dw, dk) = losses(q, k, lse, scale, indexer, plan, ones, budget, keep, keep)
    if keep:
        fill_uncovered(bound_q, (dq, 0.0), (dw, 0.0))
    else:
        dq, dk, dw = _kept(q_idx, k_idx, keep)
    return out, lse, kl, dq, dk, dw, plan.q_tiles, plan.key_tiles, bounds
