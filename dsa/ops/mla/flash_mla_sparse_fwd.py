"""Sparse MLA prefill: attention to selected keys of one tensor of latents, without pages."""

import torch

from dsa.kernels.mla.limits import GROUP_SIZES, SPARSE_HEAD_DIMS
from dsa.ops.mla import _shared_keys as shared_keys
from dsa.ops.mla._sparse_attention import (
    DIMS,
    DTYPES,
    Results,
    Selection,
    attend,
    attend_narrow,
    check_value_dim,
    inner_contiguous,
    of_caller,
)
from dsa.reference.mla import flash_mla_sparse_fwd as reference
from dsa.runtime.declare import (
    F32,
    FLOATS,
    INT32,
    POSITIVE,
    ROWS,
    Arguments,
    Flag,
    Int,
    Number,
    Tensor,
    check_apart,
    op,
    rows_at_16_bytes,
)

__all__ = ["flash_mla_sparse_fwd"]

FLASH_MLA_SPARSE_FWD = Arguments(
    q=Tensor("s_q h_q d", FLOATS),
    kv=Tensor("s_kv 1 d", FLOATS, like="q", layout=ROWS),
    indices=Tensor("s_q 1 K", INT32),
    sm_scale=Number(),
    d_v=Int(most="d"),
    attn_sink=Tensor("h_q", F32, optional=True),
    topk_length=Tensor("s_q", INT32, optional=True),
    enable_batch_invariant=Flag(),
)
# The heads of a query are contiguous; the stride of queries is free.
OUT = {"out": Tensor("s_q h_q d_v", FLOATS, like="q", layout=ROWS, merged=(1, 3))}


def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    enable_batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out[t, h] = sum_j softmax_j(sm_scale * q[t, h] . kv[j]) kv[j, :d_v] over the keys j in indices[t].

    q            [s_q, h_q, d] bf16 or fp16; fp32 runs the PyTorch reference, with a warning on Hopper
    kv           [s_kv, 1, d] in q's dtype; a value is the first d_v numbers of its key
    indices      [s_q, 1, K] int32; indices outside [0, s_kv) are ignored. A key that is selected twice counts twice
    sm_scale     multiplies the logits: a finite number
    d_v          at most d
    attn_sink    [h_q] fp32 or None, any value from -inf to +inf: out is scaled by e^lse / (e^lse + e^sink)
    topk_length  [s_q] int32 or None: only the first topk_length[t] indices count
    out          None, or a tensor [s_q, h_q, d_v] of q's dtype and device: the op writes every number of it, and
                 nothing between its rows. On Hopper the heads of a query must be contiguous and start at a multiple of
                 16 bytes; the stride of queries is free, as in a slice of a tensor with more heads. out must not begin
                 at the address of q or kv. If it overlaps an input elsewhere, the contents of the overlap are undefined
    enable_batch_invariant  True: a query's result does not depend on the other queries, bit for bit. False: with up to
                 16 heads the result can depend on the other queries (see below), but not on the run

    Returns out [s_q, h_q, d_v] in q's dtype, which is `out` if that was given and a new contiguous tensor otherwise,
    max_logits [s_q, h_q] fp32, the largest scaled logit, and lse [s_q, h_q] fp32 (natural log); the sink changes
    neither max_logits nor lse. A query without keys has out 0, max_logits -inf and lse +inf. NaN in kv reaches only the
    queries that select it.
    Raises TypeError or ValueError for other types, dtypes, shapes, strides and devices.
    On Hopper: d = 576 or 512 with d_v = 512, or d = 160 with d_v = 128 (A.X-K2-Light); any number of heads without
    padding (multiples of 64 fill the tensor cores, of 32 with d = 160), any K and s_kv, any strides of q, rows of kv at
    multiples of 16 bytes, sm_scale above 0. Logits and sums are fp32; softmax weights are rounded to q's dtype before
    the values are multiplied by them. CUDA-graph safe, no host synchronisation. Deterministic. No gradients on Hopper:
    use `sparse_mla_attention` for gradients.
    Most calls run one kernel without workspace, and a query's result does not depend on the other queries, bit for bit.
    Unless enable_batch_invariant is True, a call forms groups of adjacent queries if it has at most 16 heads, at least
    2^22 indices (s_q * K), enough groups for all SMs, and s_kv up to 2^21. Group g is queries 8 g to 8 g + 7 with up to
    8 heads, and queries 4 g to 4 g + 3 with more heads. The queries of a group are computed together only if no query
    selects a key twice and the union of the group's selections has at most 70% as many keys as the selections in total.
    The order in which the terms of these queries are added depends on the selections of the whole group, and a query's
    group depends on the query's row in q. Calls that form groups need a workspace of 2.8 bytes per index, for example
    376 MB for 65536 queries with K = 2048.
    Source: FlashMLA's function of this name, which takes 64 and 128 heads and K in multiples of 128.
    """
    arguments = (q, kv, indices, sm_scale, d_v, attn_sink, topk_length, enable_batch_invariant)
    if out is None:
        return _sparse_mla_prefill(*arguments)
    check_apart("out", out, q=q, kv=kv)
    return out, *_sparse_mla_prefill.into(*arguments, out)


def _results(q: torch.Tensor, d_v: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _allocate_out(q, d_v), *_statistics(q)


def _allocate_out(q: torch.Tensor, d_v: int) -> torch.Tensor:
    return q.new_empty(*q.shape[:2], d_v)


def _statistics(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(q.new_empty(q.shape[:2], dtype=torch.float32) for _ in range(2))


def _check_dims(q: torch.Tensor, d_v: int) -> None:
    check_value_dim("d_v", q.shape[-1], d_v)


@op(
    arguments=FLASH_MLA_SPARSE_FWD,
    reference=reference.flash_mla_sparse_fwd,
    results=_results,
    limits={"d": tuple(DIMS), "sm_scale": POSITIVE},
    rule=_check_dims,
    out=OUT,
    dtypes=DTYPES,
    public="flash_mla_sparse_fwd",
)
def _sparse_mla_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int,
    attn_sink: torch.Tensor | None,
    topk_length: torch.Tensor | None,
    enable_batch_invariant: bool,
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    out = _allocate_out(q, d_v) if out is None else out
    max_logits, lse = _statistics(q)
    if 0 in q.shape[:2] or 0 in (kv.shape[0], indices.shape[2]):
        return out.zero_(), max_logits.fill_(-torch.inf), lse.fill_(torch.inf)

    counts = None if topk_length is None else inner_contiguous(topk_length)
    sink = None if attn_sink is None else inner_contiguous(attn_sink)
    selection = Selection(rows_at_16_bytes(kv), inner_contiguous(indices), counts)
    results = Results(of_caller(out), lse, max_logits)
    if q.shape[2] not in SPARSE_HEAD_DIMS:
        selection = selection._replace(indices=selection.indices.squeeze(1))
        results = Results(results.out[:, None], lse[..., None], max_logits[:, None])
        attend_narrow(q[:, None], selection, sm_scale, sink, results, few=False)
        return out, max_logits, lse
    few_heads = q.shape[1] <= max(GROUP_SIZES)
    if few_heads and not enable_batch_invariant and shared_keys.may_share(q, selection):
        shared_keys.attend_groups(q, selection, sm_scale, sink, results)
    else:
        attend(q, [selection], sm_scale, sink, results, may_split=False)
    return out, max_logits, lse
