"""Sparse MLA prefill: attention to selected keys of one contiguous latent array."""

import math

import torch

from dsa import backends
from dsa.kernels.mla.limits import HEAD_DIM_V, SPARSE_HEAD_DIMS
from dsa.ops._aligned import rows_at_16_bytes
from dsa.ops._kernel_arguments import dtype_name
from dsa.ops.mla._sparse_attention import DTYPES, Results, Selection, attend, inner_contiguous
from dsa.reference.checks import check_same_dtype
from dsa.reference.mla import flash_mla_sparse_fwd as reference

__all__ = ["flash_mla_sparse_fwd"]


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

    q            [s_q, h_q, d] bf16 or fp16; fp32 runs the PyTorch reference, with a warning on Hopper
    kv           [s_kv, 1, d] in q's dtype; a value is the first d_v numbers of its key
    indices      [s_q, 1, K] int32; negative or at least s_kv is no key. A key named twice counts twice
    sm_scale     multiplies the logits: a finite number
    d_v          at most d
    attn_sink    [h_q] fp32 or None, any value from -inf to +inf: out is scaled by e^lse / (e^lse + e^sink)
    topk_length  [s_q] int32 or None: only the first topk_length[t] indices count

    Returns out [s_q, h_q, d_v] in q's dtype, max_logits [s_q, h_q] fp32, the largest scaled logit, and lse [s_q, h_q]
    fp32 (natural log); the sink changes neither of the last two. A query without keys has out 0, max_logits -inf and
    lse +inf. NaN in kv reaches only the queries that select it.
    Raises TypeError or ValueError for other types, dtypes, shapes, strides and devices.
    On Hopper: d = 576 or 512 with d_v = 512, any number of heads without padding (multiples of 64 fill the tensor
    cores), any K and s_kv, any strides of q, rows of kv at multiples of 16 bytes, sm_scale above 0. Logits and sums are
    fp32; softmax weights are rounded to q's dtype before they meet the values. One kernel, no workspace. Deterministic,
    and a query's result does not depend on the others, bit for bit. CUDA-graph safe, no host synchronisation.
    Source: FlashMLA's function of this name, which takes 64 and 128 heads and K in multiples of 128.
    """
    arguments = (q, kv, indices, sm_scale, d_v, attn_sink, topk_length)
    if isinstance(q, torch.Tensor) and q.dtype == torch.float32:
        reference.check_sparse_fwd(*arguments)
        check_same_dtype(("q", q), kv=kv)
        backends.note_reference_only("flash_mla_sparse_fwd in float32", q)
        return reference.flash_mla_sparse_fwd(*arguments)
    return (torch.ops.dsa.sparse_mla_prefill if torch.compiler.is_compiling() else _forward)(*arguments)


def _forward(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int,
    attn_sink: torch.Tensor | None,
    topk_length: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    arguments = (q, kv, indices, sm_scale, d_v, attn_sink, topk_length)
    reference.check_sparse_fwd(*arguments)
    if not backends.runs_kernel("flash_mla_sparse_fwd", q):
        return reference.flash_mla_sparse_fwd(*arguments)
    _check_kernel_takes(q, kv, sm_scale, d_v)
    out, max_logits, lse = _allocate(q, d_v)
    if 0 in q.shape[:2] or 0 in (kv.shape[0], indices.shape[2]):
        return out.zero_(), max_logits.fill_(-torch.inf), lse.fill_(torch.inf)
    # All keys as one page.
    cache = rows_at_16_bytes(kv.squeeze(1).unsqueeze(0))
    counts = None if topk_length is None else inner_contiguous(topk_length)
    sink = None if attn_sink is None else inner_contiguous(attn_sink)
    selection = Selection(cache, inner_contiguous(indices.squeeze(1)), counts)
    results = Results(out.unsqueeze(1), lse.unsqueeze(2), max_logits)
    attend(q, [selection], sm_scale, sink, results, may_split=False)
    return out, max_logits, lse


def _allocate(q: torch.Tensor, d_v: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = q.shape[:2]
    return (q.new_empty(*rows, d_v), *(q.new_empty(rows, dtype=torch.float32) for _ in range(2)))


def _check_kernel_takes(
    q: torch.Tensor,
    kv: torch.Tensor,
    sm_scale: float,
    d_v: int,
) -> None:
    if q.dtype not in DTYPES:
        raise ValueError(f"q: the Hopper kernel takes bfloat16 or float16, got {dtype_name(q.dtype)}")
    if q.shape[2] not in SPARSE_HEAD_DIMS:
        raise ValueError(
            f"q: the Hopper kernel takes d = {SPARSE_HEAD_DIMS[0]} or {SPARSE_HEAD_DIMS[1]}, got shape {list(q.shape)}"
        )
    if d_v != HEAD_DIM_V:
        raise ValueError(f"d_v: the Hopper kernel takes {HEAD_DIM_V}, got {d_v}")
    if kv.numel() and rows_at_16_bytes(kv) is None:
        raise ValueError(
            "kv: channels must be contiguous and keys start at multiples of 16 bytes, got strides "
            f"{list(kv.stride())} and an address {kv.data_ptr() % 16} bytes past one"
        )
    if not 0 < sm_scale < math.inf:
        raise ValueError(f"sm_scale: the Hopper kernel takes a positive number, got {sm_scale}")


torch.library.custom_op("dsa::sparse_mla_prefill", mutates_args=())(_forward)


@torch.library.register_fake("dsa::sparse_mla_prefill")
def _(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int,
    attn_sink: torch.Tensor | None,
    topk_length: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    reference.check_sparse_fwd(q, kv, indices, sm_scale, d_v, attn_sink, topk_length)
    return _allocate(q, d_v)
