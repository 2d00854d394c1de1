"""The indexer's loss in the sparse stage, over selected keys, and its gradients."""

import math
from collections.abc import Callable
from typing import Any

import torch

from dsa.kernels.training.limits import (
    INDEX_CHANNELS,
    MAX_INDEX_HEADS,
    MAX_SPARSE_HEADS,
    MAX_SPARSE_KEYS,
    MLA_CHANNELS,
    SPARSE_HEAD_TILE,
    SPARSE_KEY_TILE,
)
from dsa.ops.mla._sparse_attention import inner_contiguous
from dsa.ops.mla.flash_mla_sparse_fwd import flash_mla_sparse_fwd
from dsa.ops.training.sparse_mla_attention import DTYPES
from dsa.reference.training import sparse_indexer_loss as reference
from dsa.runtime import backends
from dsa.runtime.declare import INT32, ROWS, Arguments, Flag, Gradient, Number, Tensor, at_most, op, rows_at_16_bytes

__all__ = ["sparse_indexer_loss"]

_INDEXER = {
    "q_idx": Tensor("Tq Hi di", DTYPES),
    "k_idx": Tensor("Tk di", DTYPES, like="q_idx", layout=ROWS),
    "w_idx": Tensor("Tq Hi", DTYPES, like="q_idx", besides=(torch.float32,)),
    "indices": Tensor("Tq 1 K", INT32),
}
SPARSE_INDEXER_LOSS = Arguments(
    q=Tensor("Tq H d", DTYPES),
    kv=Tensor("Tk 1 d", DTYPES, like="q", layout=ROWS),
    **_INDEXER | {"q_idx": Tensor("Tq Hi di", DTYPES, like="q")},
    softmax_scale=Number(),
    lse=Tensor("H Tq", DTYPES, optional=True),
    deterministic=Flag(optional=True),
)
SPARSE_INDEXER_LOSS_GRADIENT = Arguments(
    **_INDEXER,
    grad=Tensor("Tq", DTYPES),
    d_scores=Tensor("Tq width", DTYPES, like="q_idx"),
    deterministic=Flag(),
)

# With `deterministic`, k_idx's gradient is summed as fixed-point numbers in 64-bit integers, below 2^SUM_BITS. The
# scale is at most 2^SCALE_BITS and at least 2^-SCALE_BITS, so that it is a normal fp32 number.
SUM_BITS, SCALE_BITS = 62, 126


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

    q              [Tq, H, d] bf16 on Hopper; kv [Tk, 1, d] in q's dtype
    q_idx          [Tq, Hi, di] and k_idx [Tk, di] in q's dtype; w_idx [Tq, Hi] in q's dtype or fp32, of any sign
    indices        int32 [Tq, 1, K]. Indices outside [0, Tk) are ignored. A key that is selected twice counts twice
    softmax_scale  multiplies the logits: a finite number
    lse            [H, Tq] fp32, bf16, fp16 or float64: each head's LSE over all keys of the head's softmax (natural
                   log). The softmax of V4's attention also covers a window and a sink. With the lse of that softmax,
                   the weight of a head in p is the share of attention that the head gives to the selected keys. None:
                   the LSE over the selected keys alone, which the op computes by `flash_mla_sparse_fwd`, so that all
                   heads have the same weight (V3.2)
    deterministic  True: k_idx's gradient is bit-identical from run to run, as a sum of 64-bit integers. Everything else
                   is always deterministic. None: the value of torch.are_deterministic_algorithms_enabled() in the
                   forward pass

    Returns kl [Tq] fp32. A query without keys has kl 0. Gradients flow only to q_idx, k_idx and w_idx. For the backward
    pass the forward pass keeps the indexer's tensors, the indices and the gradient of kl with respect to I, [Tq, K] in
    q's dtype. The relu has no gradient at 0. NaN in a row of kv or k_idx that is not selected has no effect. On Hopper
    and under torch.compile a second backward pass raises RuntimeError.
    Raises TypeError or ValueError for other types, dtypes, shapes, strides and devices.
    On Hopper: bf16, d = 576 or 512, up to 128 heads (a multiple of 64 fills the tensor cores), up to 64 index heads of
    64 or 128 channels, K up to 2048; rows of kv and k_idx at multiples of 16 bytes. fp16, fp32 and float64 run the
    PyTorch reference, with a warning. The forward pass runs one kernel, and before it `flash_mla_sparse_fwd` if lse is
    None. The backward pass runs one kernel, which sums k_idx's gradient in fp32, without a fixed order, unless
    `deterministic` is set. If the heads of a query give less than e^-129 of their attention to each of the query's
    keys, the query's gradients are 0. softmax_scale above 0 unless lse is given. CUDA-graph safe, no host
    synchronisation.
    Source: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1.1.
    """
    kl, _ = _sparse_indexer_loss(q, kv, q_idx, k_idx, w_idx, indices, softmax_scale, lse, deterministic)
    return kl


def _fixed_scale(
    q: torch.Tensor, w: torch.Tensor, g: torch.Tensor, d_scores: torch.Tensor, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (scale [1], 1 / scale [1]) for fixed-point gradients, so that a sum of `most` terms fits in SUM_BITS."""
    # dk[j] is a sum of at most `most` terms, one per query t and index that selects key j: d_scores[t, j] sum_i a_i
    # g[t] w[t, i] q_i[t] over the index heads i. |d_scores| <= 1, and a_i is 1 if q_i[t] . k[j] > 0, else 0. d_scores
    # and the products g w q are rounded to bf16, hence the factor 1.02.
    bound = 1.02 * g.abs().amax() * w.abs().sum(1).amax() * torch.stack(torch.aminmax(q)).abs().amax()
    exponent = SUM_BITS - most.bit_length() - torch.frexp(bound)[1]
    scale = torch.ldexp(torch.ones_like(bound), exponent.clamp(-SCALE_BITS, SCALE_BITS)).view(1)
    # Integers cannot be NaN, so the inverse becomes NaN if the bound is NaN or infinite, or if d_scores contain a NaN.
    # If one of a query's d_scores is NaN, the first one is, too.
    return scale, 1 / scale.double() + (bound - bound) + 0 * d_scores[:, 0].sum()


def _rows(x: torch.Tensor) -> torch.Tensor:
    aligned = rows_at_16_bytes(x)
    return x.contiguous().clone() if aligned is None else aligned


def _check_scale(softmax_scale: float, lse: torch.Tensor | None) -> None:
    if lse is None and softmax_scale <= 0:
        raise ValueError(f"softmax_scale: the kernel takes a positive number without lse, got {softmax_scale}")


def _gradient_results(
    q_idx: torch.Tensor, k_idx: torch.Tensor, w_idx: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tuple(x.new_empty(x.shape) for x in (q_idx, k_idx, w_idx))


@op(
    arguments=SPARSE_INDEXER_LOSS_GRADIENT,
    reference=reference.sparse_indexer_loss_gradient,
    results=_gradient_results,
    recorded=False,
    public="sparse_indexer_loss",
)
def _sparse_indexer_loss_gradient(
    q_idx: torch.Tensor,
    k_idx: torch.Tensor,
    w_idx: torch.Tensor,
    indices: torch.Tensor,
    grad: torch.Tensor,
    d_scores: torch.Tensor,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from dsa.kernels.training.sparse_indexer_grad_sm90 import compile_sparse_indexer_grad

    queries = len(q_idx)
    if 0 in (q_idx.numel(), k_idx.numel(), d_scores.numel()):
        return tuple(x.zero_() for x in _gradient_results(q_idx, k_idx, w_idx))
    weights, grad = w_idx.float(), grad.float()
    dq = torch.empty(q_idx.shape, dtype=q_idx.dtype, device=q_idx.device)
    dw = torch.empty(w_idx.shape, dtype=torch.float32, device=q_idx.device)
    sums = torch.zeros(k_idx.shape, dtype=torch.int64 if deterministic else torch.float32, device=q_idx.device)
    fixed_scale = inverse = None
    if deterministic:
        fixed_scale, inverse = _fixed_scale(q_idx, weights, grad, d_scores, indices.numel())
    launch = compile_sparse_indexer_grad(q_idx.shape[2], deterministic)
    with backends.on_device(q_idx):
        launch(
            *(
                _rows(q_idx),
                rows_at_16_bytes(k_idx),
                weights,
                inner_contiguous(indices[:, 0]),
                d_scores,
                grad,
                fixed_scale,
            ),
            *(dq, dw, sums),
            min(queries, backends.num_sms(q_idx.device)),
        )
    dk = sums if inverse is None else sums.double() * inverse
    return dq, dk.to(k_idx.dtype), dw.to(w_idx.dtype)


def _save(ctx: Any, arguments: tuple[Any, ...], results: tuple[torch.Tensor, torch.Tensor]) -> None:
    _, _, q_idx, k_idx, w_idx, indices, _, _, deterministic = arguments
    _, d_scores = results
    ctx.deterministic = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
    ctx.mark_non_differentiable(d_scores)
    ctx.save_for_backward(q_idx, k_idx, w_idx, indices, d_scores)


def _backward(ctx: Any, run: Callable[..., Any], grad: torch.Tensor | None, _: None) -> tuple[torch.Tensor | None, ...]:
    if grad is None:
        return (None,) * 9
    *indexer, d_scores = ctx.saved_tensors
    dq, dk, dw = run(_sparse_indexer_loss_gradient, *indexer, grad, d_scores, ctx.deterministic)
    return None, None, dq, dk, dw, None, None, None, None


def _results(q: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate kl [Tq] and d_scores, the gradient of kl with respect to I: [Tq, K rounded up to a multiple of 64] in
    q's dtype."""
    width = -(-indices.shape[2] // SPARSE_KEY_TILE) * SPARSE_KEY_TILE
    kl_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(len(q), dtype=kl_dtype), q.new_empty(len(q), width)


def _reference(
    q: torch.Tensor,
    kv: torch.Tensor,
    q_idx: torch.Tensor,
    k_idx: torch.Tensor,
    w_idx: torch.Tensor,
    indices: torch.Tensor,
    softmax_scale: float,
    lse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    kl, d_scores = reference.loss_and_score_gradient(q, kv, q_idx, k_idx, w_idx, indices, softmax_scale, lse)
    padding = -indices.shape[2] % SPARSE_KEY_TILE
    return kl, torch.nn.functional.pad(d_scores, (0, padding)).to(q.dtype)


@op(
    arguments=SPARSE_INDEXER_LOSS,
    reference=_reference,
    results=_results,
    limits={
        "d": MLA_CHANNELS,
        "H": at_most(MAX_SPARSE_HEADS),
        "di": INDEX_CHANNELS,
        "Hi": at_most(MAX_INDEX_HEADS, least=1),
        "K": at_most(MAX_SPARSE_KEYS),
    },
    rule=_check_scale,
    gradient=Gradient(_save, _backward),
    recorded=False,
    dtypes=(torch.bfloat16,),
)
def _sparse_indexer_loss(
    q: torch.Tensor,
    kv: torch.Tensor,
    q_idx: torch.Tensor,
    k_idx: torch.Tensor,
    w_idx: torch.Tensor,
    indices: torch.Tensor,
    softmax_scale: float,
    lse: torch.Tensor | None,
    deterministic: bool | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    from dsa.kernels.training.sparse_indexer_target_sm90 import compile_sparse_indexer_target

    queries, (kl, d_scores) = len(q), _results(q, indices)
    if 0 in (q.numel(), kv.numel(), q_idx.numel(), d_scores.shape[1]):
        return kl.zero_(), d_scores.zero_()
    if lse is None:
        lse = flash_mla_sparse_fwd(q, kv, indices, softmax_scale)[2]
    else:
        lse = lse.float().T
    row_tiles = -(-q.shape[1] // SPARSE_HEAD_TILE)
    launch = compile_sparse_indexer_target(q.shape[2], row_tiles, q_idx.shape[2])
    with backends.on_device(q):
        launch(
            *(_rows(q), rows_at_16_bytes(kv[:, 0]), _rows(q_idx), rows_at_16_bytes(k_idx), w_idx.float()),
            *(inner_contiguous(indices[:, 0]), lse, kl, d_scores),
            *(softmax_scale * math.log2(math.e), min(queries, backends.num_sms(q.device))),
        )
    return kl, d_scores
