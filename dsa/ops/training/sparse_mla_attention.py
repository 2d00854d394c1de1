"""Sparse MLA attention to selected latents, with gradients: the attention of training's sparse stage."""

import math
from collections.abc import Callable
from typing import Any

import torch

from dsa.kernels.training.limits import (
    MLA_CHANNELS,
    MLA_V_CHANNELS,
    SPARSE_DTYPES,
    SPARSE_HEAD_TILE,
    SPARSE_KEY_TILE,
)
from dsa.ops.mla._sparse_attention import inner_contiguous
from dsa.ops.mla.flash_mla_sparse_fwd import flash_mla_sparse_fwd
from dsa.reference.training import sparse_mla_attention as reference
from dsa.runtime import backends
from dsa.runtime.declare import (
    FLOATS,
    INT32,
    POSITIVE,
    ROWS,
    Arguments,
    Flag,
    Gradient,
    Int,
    Number,
    Tensor,
    dtype_name,
    op,
    tma_rows,
)

__all__ = ["sparse_mla_attention"]

DTYPES = (*FLOATS, torch.float64)
KERNEL_DTYPES = tuple(getattr(torch, name) for name in SPARSE_DTYPES)
_TENSORS = {
    "q": Tensor("Tq H d", DTYPES),
    "kv": Tensor("Tk 1 d", DTYPES, like="q", layout=ROWS),
    "indices": Tensor("Tq 1 K", INT32),
    "softmax_scale": Number(),
}
SPARSE_MLA_ATTENTION = Arguments(
    **_TENSORS,
    d_v=Int(most="d"),
    attn_sink=Tensor("H", DTYPES, optional=True),
    deterministic=Flag(optional=True),
)
SPARSE_MLA_ATTENTION_GRADIENT = Arguments(
    **_TENSORS,
    attn_sink=Tensor("H", DTYPES, optional=True),
    out=Tensor("Tq H dv", DTYPES, like="q"),
    lse=Tensor("H Tq", DTYPES),
    grad_out=Tensor("Tq H dv", DTYPES, optional=True),
    grad_lse=Tensor("H Tq", DTYPES, optional=True),
    deterministic=Flag(optional=True),
)


def sparse_mla_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    softmax_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    deterministic: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out_h[t] = sum_j softmax_j(softmax_scale q_h[t] . kv[j]) kv[j, :d_v] over the keys j in indices[t], with
    gradients.

    q              [Tq, H, d] bf16 or fp16; fp32 and float64 run the PyTorch reference, with a warning on Hopper
    kv             [Tk, 1, d] in q's dtype; a value is the first d_v numbers of its key
    indices        int32 [Tq, 1, K]. Indices outside [0, Tk) are ignored. A key that is selected twice counts twice
    softmax_scale  multiplies the logits: a finite number
    d_v            from 1 to d
    attn_sink      [H] or None: one more logit per head, without a value vector: out is scaled by e^lse / (e^lse +
                   e^sink)
    deterministic  True: kv's gradient is summed in a fixed order and bit-identical from run to run, but the backward
                   pass is several times slower. The order depends on the number of queries and on the number of SMs.
                   None: the value of torch.are_deterministic_algorithms_enabled() when the gradient is computed

    Returns out [Tq, H, d_v] in q's dtype and lse [H, Tq] fp32 (natural log), without the sink. A query without keys has
    out 0 and lse +inf; its gradient is 0, and it adds nothing to other gradients. The gradients of out and lse flow to
    q and kv, the gradient of out also to attn_sink. On Hopper and under torch.compile a second backward pass raises
    RuntimeError.
    Raises TypeError or ValueError for other types, dtypes, shapes, strides and devices.
    On Hopper: d = 576 or 512 with d_v = 512, any number of heads (multiples of 64 fill the tensor cores), any K and Tk,
    softmax_scale above 0. The forward pass is `flash_mla_sparse_fwd`. The backward pass rounds the softmax weights and
    the gradients of the logits to q's dtype before it multiplies them. It sums kv's gradient in fp32, without a fixed
    order unless `deterministic` is set. The gradients of q and attn_sink are always bit-identical from run to run. The
    workspace is 4 Tk d bytes and 8 bytes per query and head, with `deterministic` and K = 2048 also about 5 MB per SM.
    If e^sink is above 2^64 e^lse, the backward pass uses 2^64 e^lse instead. CUDA-graph safe, no host synchronisation.
    Source: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1.1.
    """
    return _sparse_mla_attention(q, kv, indices, softmax_scale, d_v, attn_sink, deterministic)


def gradients(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
    sink: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return (dq, dkv, the sink's gradient or None). lse and dlse are fp32 [Tq, H]; the other arguments are those of
    the op."""
    from dsa.kernels.training import sparse_mla_backward_sums_sm90 as sum_kernels
    from dsa.kernels.training.sparse_mla_backward_sm90 import compile_sparse_mla_backward

    tokens, heads, dim = q.shape
    keys, top_k = len(kv), indices.shape[2]
    dq, dkv = q.new_empty(q.shape), kv.new_empty(kv.shape)
    if 0 in (tokens, heads, keys, top_k):
        return dq.zero_(), dkv.zero_(), None if sink is None else torch.zeros_like(sink)
    dout = torch.zeros_like(out) if dout is None else tma_rows(dout.to(q.dtype))
    q, rows, topk_indices = tma_rows(q), tma_rows(kv.squeeze(1)), inner_contiguous(indices.squeeze(1))
    head_tiles, key_tiles = -(-heads // SPARSE_HEAD_TILE), -(-top_k // SPARSE_KEY_TILE)
    head_terms = q.new_empty(tokens, head_tiles, 2 * SPARSE_HEAD_TILE, dtype=torch.float32)
    shares = None if sink is None else torch.empty_like(lse)
    name, sms = dtype_name(q.dtype), backends.num_sms(q.device)
    scale = float(scale)
    scales = (scale, scale * math.log2(math.e))
    with backends.on_device(q):
        sum_kernels.compile_backward_inputs(name, sink is not None, dlse is not None)(
            *(out, dout, lse, None if dlse is None else dlse.float()),
            *(None if sink is None else sink.float(), scale, head_terms, shares),
        )
        launch = compile_sparse_mla_backward(name, dim, deterministic)
        if deterministic:
            sum_lists = sum_kernels.compile_sum_lists(dim)
            sums = q.new_zeros(keys, dim, dtype=torch.float32)
            most = -(-sms // head_tiles)  # queries per launch: enough for one work tile per SM
            found = q.new_empty(min(most, tokens) * head_tiles * key_tiles * SPARSE_KEY_TILE, dim, dtype=torch.float32)
            counters = torch.zeros(-(-tokens // most), 1, dtype=torch.int32, device=q.device)
            for n, first in enumerate(range(0, tokens, most)):
                part = slice(first, min(first + most, tokens))
                ctas = min(sms, (part.stop - first) * head_tiles)
                of_part = q[part], rows, dout[part], head_terms[part], topk_indices[part], dq[part], found
                launch(*of_part, counters[n], *scales, ctas)
                order, bounds = _lists(topk_indices[part], keys, head_tiles * key_tiles * SPARSE_KEY_TILE)
                sum_lists(found, order, bounds, head_tiles, key_tiles * SPARSE_KEY_TILE, sums)
        else:
            ctas = min(sms, tokens * head_tiles)
            # One more row per CTA receives the gradients of invalid indices.
            sums = q.new_zeros(keys + ctas, dim, dtype=torch.float32)
            counter = torch.zeros(1, dtype=torch.int32, device=q.device)
            launch(q, rows, dout, head_terms, topk_indices, dq, sums, counter, *scales, ctas)
        sum_kernels.compile_reorder_sums(name, dim)(sums, dkv.squeeze(1))
    return dq, dkv, None if sink is None else shares.sum(0).to(sink.dtype)


def _lists(indices: torch.Tensor, keys: int, stride: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rows, bounds), int32, for `sum_lists`. A row of `found` is a term of a key's dkv, from one tile of heads.
    `rows` lists the rows of `found` of the first head tile, ordered by key; the rows of invalid indices come last.
    rows[bounds[j] : bounds[j + 1]] belong to key j. `found` has `stride` rows per query. In the first head tile, row i
    of a query is the term for the query's index i."""
    top_k = indices.shape[1]
    flat = indices.reshape(-1)
    flat = torch.where((flat >= 0) & (flat < keys), flat, keys)
    ordered, order = torch.sort(flat, stable=True)
    bounds = torch.searchsorted(ordered, torch.arange(keys + 1, device=flat.device, dtype=flat.dtype), out_int32=True)
    return (order // top_k * stride + order % top_k).int(), bounds


def _gradient_results(
    q: torch.Tensor, kv: torch.Tensor, attn_sink: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    sinks = (0, q.dtype) if attn_sink is None else (len(attn_sink), attn_sink.dtype)
    return q.new_empty(q.shape), kv.new_empty(kv.shape), q.new_empty(sinks[0], dtype=sinks[1])


def _reference_gradient(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    softmax_scale: float,
    attn_sink: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    grad_out: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tensors = q, kv, indices, softmax_scale, attn_sink, out, lse, grad_out, grad_lse
    return _all_tensors(q, *reference.sparse_mla_attention_gradient(*tensors))


@op(
    arguments=SPARSE_MLA_ATTENTION_GRADIENT,
    reference=_reference_gradient,
    results=_gradient_results,
    recorded=False,
    public="sparse_mla_attention",
)
def _sparse_mla_attention_gradient(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    softmax_scale: float,
    attn_sink: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    grad_out: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    deterministic: bool | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Without a sink the third result is an empty tensor."""
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    grad_lse = None if grad_lse is None else grad_lse.T
    of_forward = q, kv, indices, softmax_scale, attn_sink, out, lse.T
    return _all_tensors(q, *gradients(*of_forward, grad_out, grad_lse, deterministic))


def _all_tensors(
    q: torch.Tensor, dq: torch.Tensor, dkv: torch.Tensor, dsink: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Torch's op must return tensors, so an empty tensor stands for None."""
    return dq, dkv, q.new_empty(0) if dsink is None else dsink


def _save(ctx: Any, arguments: tuple[Any, ...], results: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, kv, indices, ctx.scale, _, sink, ctx.deterministic = arguments
    ctx.save_for_backward(q, kv, indices, sink, *results)


def _backward(
    ctx: Any, run: Callable[..., Any], grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    if grad_out is None and grad_lse is None:
        return (None,) * 7
    q, kv, indices, sink, out, lse = ctx.saved_tensors
    of_forward = q, kv, indices, ctx.scale, sink, out, lse
    dq, dkv, dsink = run(_sparse_mla_attention_gradient, *of_forward, grad_out, grad_lse, ctx.deterministic)
    return dq, dkv, None, None, None, None if sink is None else dsink, None


def _results(q: torch.Tensor, d_v: int) -> tuple[torch.Tensor, torch.Tensor]:
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(*q.shape[:2], d_v), q.new_empty(q.shape[:2], dtype=lse_dtype).T


def _reference(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    softmax_scale: float,
    d_v: int,
    attn_sink: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = reference.sparse_mla_attention(q, kv, indices, softmax_scale, d_v, attn_sink)
    return out.contiguous(), lse.T.contiguous().T


@op(
    arguments=SPARSE_MLA_ATTENTION,
    reference=_reference,
    results=_results,
    limits={"d": MLA_CHANNELS, "d_v": (MLA_V_CHANNELS,), "softmax_scale": POSITIVE},
    gradient=Gradient(_save, _backward),
    recorded=False,
    dtypes=KERNEL_DTYPES,
)
def _sparse_mla_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    softmax_scale: float,
    d_v: int,
    attn_sink: torch.Tensor | None,
    deterministic: bool | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    sink = None if attn_sink is None else attn_sink.float()
    out, _, lse = flash_mla_sparse_fwd(q, kv, indices, softmax_scale, d_v, sink)
    return out, lse.T
