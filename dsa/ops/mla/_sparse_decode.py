"""Sparse MLA decoding: the op that `flash_mla_with_kvcache` calls if it gets indices."""

import torch

from dsa.kernels.mla.limits import SPARSE_HEAD_DIMS
from dsa.ops.cache._specs import page_layout
from dsa.ops.mla._latent_caches import OUT, check_latent_cache, check_unused, latent_cache
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
from dsa.reference.mla import flash_mla_with_kvcache as reference
from dsa.runtime.declare import (
    F32,
    FLOATS,
    INT32,
    POSITIVE,
    Arguments,
    Flag,
    Int,
    Number,
    Tensor,
    dtype_name,
    op,
    rows_at_16_bytes,
)


def _check_sparse(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    extra_k_cache: torch.Tensor | None,
    extra_indices_in_kvcache: torch.Tensor | None,
    extra_topk_length: torch.Tensor | None,
) -> None:
    check_latent_cache("k_cache", k_cache, q)
    if extra_k_cache is None:
        unused = {"extra_indices_in_kvcache": extra_indices_in_kvcache, "extra_topk_length": extra_topk_length}
        check_unused(unused, "extra_k_cache")
        return
    check_latent_cache("extra_k_cache", extra_k_cache, q)
    if extra_indices_in_kvcache is None:
        raise TypeError("extra_indices_in_kvcache: must be a torch.Tensor, got NoneType")


SPARSE_MLA_DECODE = Arguments(
    rule=_check_sparse,
    q=Tensor("B s_q h_q d", FLOATS),
    k_cache=latent_cache("pages P 1 row", layout=page_layout),
    indices=Tensor("B s_q K", INT32),
    topk_length=Tensor("B", INT32, optional=True),
    extra_k_cache=latent_cache("extra_pages extra_P 1 extra_row", layout=page_layout, optional=True),
    extra_indices_in_kvcache=Tensor("B s_q extra_K", INT32, optional=True),
    extra_topk_length=Tensor("B", INT32, optional=True),
    head_dim_v=Int(most="d"),
    softmax_scale=Number(),
    attn_sink=Tensor("h_q", F32, optional=True),
    enable_batch_invariant=Flag(),
)


def allocate(q: torch.Tensor, head_dim_v: int) -> tuple[torch.Tensor, torch.Tensor]:
    return _allocate_out(q, head_dim_v), _allocate_lse(q)


def _allocate_out(q: torch.Tensor, head_dim_v: int) -> torch.Tensor:
    return q.new_empty(*q.shape[:3], head_dim_v)


def _allocate_lse(q: torch.Tensor) -> torch.Tensor:
    """Allocate lse [B, h_q, s_q] with the strides of a transposed [B, s_q, h_q], which is FlashMLA's layout.
    Transposing it instead would cost a step in every recorded call."""
    batch, s_q, h_q, _ = q.shape
    width = max(h_q, 1)
    return q.new_empty_strided((batch, h_q, s_q), (max(s_q, 1) * width, 1, width), dtype=torch.float32)


def _check_kernel(q: torch.Tensor, k_cache: torch.Tensor, extra_k_cache: torch.Tensor | None, head_dim_v: int) -> None:
    d = q.shape[-1]
    check_value_dim("head_dim_v", d, head_dim_v)
    if extra_k_cache is not None and d not in SPARSE_HEAD_DIMS:
        raise ValueError(f"extra_k_cache: must be None for d = {d}, got {type(extra_k_cache).__name__}")
    check_cache("k_cache", k_cache, q)
    if extra_k_cache is not None:
        check_cache("extra_k_cache", extra_k_cache, q)


@op(
    arguments=SPARSE_MLA_DECODE,
    reference=reference.sparse_mla_decode,
    results=allocate,
    limits={"d": tuple(DIMS), "softmax_scale": POSITIVE},
    rule=_check_kernel,
    out=OUT,
    dtypes=DTYPES,
    public="flash_mla_with_kvcache",
)
def _sparse_mla_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    topk_length: torch.Tensor | None,
    extra_k_cache: torch.Tensor | None,
    extra_indices_in_kvcache: torch.Tensor | None,
    extra_topk_length: torch.Tensor | None,
    head_dim_v: int,
    softmax_scale: float,
    attn_sink: torch.Tensor | None,
    enable_batch_invariant: bool,
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    out = _allocate_out(q, head_dim_v) if out is None else out
    lse = _allocate_lse(q)
    selections = []
    for cache, index, counts in (
        (k_cache, indices, topk_length),
        (extra_k_cache, extra_indices_in_kvcache, extra_topk_length),
    ):
        if cache is not None and 0 not in (cache.shape[0], cache.shape[1], index.shape[2]):
            cache = (_byte_pages(cache) if _is_bytes(cache) else rows_at_16_bytes(cache)).squeeze(2)
            counts = None if counts is None else inner_contiguous(counts)
            selections.append(Selection(cache, inner_contiguous(index.flatten(0, 1)), counts))
    if 0 in q.shape[:3] or not selections:
        return out.zero_(), lse.fill_(torch.inf)

    results = Results(of_caller(out), lse, None)
    sink = None if attn_sink is None else inner_contiguous(attn_sink)
    if q.shape[-1] in SPARSE_HEAD_DIMS:
        attend(q.flatten(0, 1), selections, softmax_scale, sink, results, may_split=not enable_batch_invariant)
    else:
        attend_narrow(q, selections[0], softmax_scale, sink, results, few=not enable_batch_invariant)
    return out, lse


def check_cache(name: str, cache: torch.Tensor, q: torch.Tensor) -> None:
    if _is_bytes(cache) and q.dtype != torch.bfloat16:
        raise ValueError(f"q: the kernel takes bfloat16 with a byte cache, got {dtype_name(q.dtype)}")


def _is_bytes(cache: torch.Tensor) -> bool:
    return cache.element_size() == 1


def _byte_pages(cache: torch.Tensor) -> torch.Tensor:
    """Return the cache as uint8, with the strides of dimensions of size 1 replaced as kernels require."""
    pages, page_size, _, width = cache.shape
    stride = cache.stride(0) if pages > 1 else page_size * width + -page_size * width % 16
    return cache.view(torch.uint8).as_strided(cache.shape, (stride, width, width, 1))
