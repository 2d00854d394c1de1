"""Sparse MLA decoding: what `flash_mla_with_kvcache` does with indices, once its arguments are checked."""

import math

import torch

from dsa import backends
from dsa.kernels.mla.limits import HEAD_DIM_V, SPARSE_HEAD_DIMS
from dsa.ops._aligned import rows_at_16_bytes
from dsa.ops._kernel_arguments import dtype_name
from dsa.ops.mla._sparse_attention import DTYPES, Results, Selection, attend, inner_contiguous
from dsa.reference.mla import flash_mla_with_kvcache as reference


def decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    topk_length: torch.Tensor | None,
    extra_k_cache: torch.Tensor | None,
    extra_indices: torch.Tensor | None,
    extra_topk_length: torch.Tensor | None,
    head_dim_v: int,
    scale: float,
    attn_sink: torch.Tensor | None,
    batch_invariant: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of checked arguments, which the kernel takes, if it is to run: `check_kernel_takes`."""
    selections = ((k_cache, indices, topk_length), (extra_k_cache, extra_indices, extra_topk_length))
    if not backends.runs_kernel("flash_mla_with_kvcache", q):
        out, lse = reference.decode_sparse(q, *selections, head_dim_v, scale, attn_sink)
        return out.to(q.dtype), lse
    batch, s_q, h_q, _ = q.shape
    out, lse = _allocate(q, head_dim_v)
    given = []
    for cache, index, counts in selections:
        if cache is not None and 0 not in (cache.shape[0], cache.shape[1], index.shape[2]):
            cache = (_byte_pages(cache) if _is_bytes(cache) else rows_at_16_bytes(cache)).squeeze(2)
            counts = None if counts is None else inner_contiguous(counts)
            given.append(Selection(cache, inner_contiguous(index.flatten(0, 1)), counts))
    if 0 in (batch, s_q, h_q) or not given:
        return out.zero_(), lse.fill_(torch.inf)
    rows = q.flatten(0, 1)
    sink = None if attn_sink is None else inner_contiguous(attn_sink)
    attend(rows, given, scale, sink, Results(out, lse, None), may_split=not batch_invariant)
    return out, lse


def check_kernel_takes(
    q: torch.Tensor,
    selections: tuple[tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None], ...],
    head_dim_v: int,
    scale: float,
) -> None:
    """Of arguments that the reference takes, what the Hopper kernel does not."""
    if q.shape[3] not in SPARSE_HEAD_DIMS:
        raise ValueError(
            f"q: the Hopper kernel takes d = {SPARSE_HEAD_DIMS[0]} or {SPARSE_HEAD_DIMS[1]}, got shape {list(q.shape)}"
        )
    if head_dim_v != HEAD_DIM_V:
        raise ValueError(f"head_dim_v: the Hopper kernel takes {HEAD_DIM_V}, got {head_dim_v}")
    if not 0 < scale < math.inf:
        raise ValueError(f"softmax_scale: the Hopper kernel takes a positive number, got {scale}")
    for prefix, (cache, _, _) in zip(("", "extra_"), selections):
        if cache is None:
            continue
        name = f"{prefix}k_cache"
        if _is_bytes(cache):
            if q.dtype != torch.bfloat16:
                raise ValueError(f"q: the Hopper kernel takes bfloat16 with a byte cache, got {dtype_name(q.dtype)}")
            _check_bytes(name, cache)
            continue
        if q.dtype not in DTYPES or cache.dtype != q.dtype:
            raise ValueError(
                f"{name}: the Hopper kernel takes q's dtype {dtype_name(q.dtype)}, bfloat16 or float16, or bytes, got "
                f"{dtype_name(cache.dtype)}"
            )
        if cache.numel() and rows_at_16_bytes(cache) is None:
            raise ValueError(
                f"{name}: channels must be contiguous and keys start at multiples of 16 bytes, got strides "
                f"{list(cache.stride())} and an address {cache.data_ptr() % 16} bytes past one"
            )


def _is_bytes(cache: torch.Tensor) -> bool:
    return cache.element_size() == 1


def _check_bytes(name: str, cache: torch.Tensor) -> None:
    """Keys of a page lie one after the other, pages at multiples of 16 bytes."""
    _, page_size, _, width = cache.shape
    if cache.numel() and (cache.stride(3) != 1 or (page_size > 1 and cache.stride(1) != width)):
        raise ValueError(f"{name}: pages of bytes must be contiguous, got strides {list(cache.stride())}")
    if cache.numel() and (cache.data_ptr() % 16 or (cache.shape[0] > 1 and cache.stride(0) % 16)):
        raise ValueError(
            f"{name}: pages must start at multiples of 16 bytes, got an address {cache.data_ptr() % 16} bytes past one "
            f"and a page stride of {cache.stride(0)} bytes"
        )


def _byte_pages(cache: torch.Tensor) -> torch.Tensor:
    """The cache with the strides that the kernel is told; those of dimensions of one element mean nothing."""
    pages, page_size, _, width = cache.shape
    stride = cache.stride(0) if pages > 1 else page_size * width + -page_size * width % 16
    return cache.view(torch.uint8).as_strided(cache.shape, (stride, width, width, 1))


def _allocate(q: torch.Tensor, head_dim_v: int) -> tuple[torch.Tensor, torch.Tensor]:
    batch, s_q, h_q, _ = q.shape
    return q.new_empty(batch, s_q, h_q, head_dim_v), q.new_empty(batch, h_q, s_q, dtype=torch.float32)


def _checked_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    topk_length: torch.Tensor | None,
    extra_k_cache: torch.Tensor | None,
    extra_indices: torch.Tensor | None,
    extra_topk_length: torch.Tensor | None,
    head_dim_v: int,
    scale: float,
    attn_sink: torch.Tensor | None,
    batch_invariant: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`decode` as torch.compile calls it: addresses and strides are known only now."""
    selections = ((k_cache, indices, topk_length), (extra_k_cache, extra_indices, extra_topk_length))
    if backends.runs_kernel("flash_mla_with_kvcache", q):
        check_kernel_takes(q, selections, head_dim_v, scale)
    return decode(q, *selections[0], *selections[1], head_dim_v, scale, attn_sink, batch_invariant)


torch.library.custom_op("dsa::sparse_mla_decode", mutates_args=())(_checked_decode)


@torch.library.register_fake("dsa::sparse_mla_decode")
def _(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    topk_length: torch.Tensor | None,
    extra_k_cache: torch.Tensor | None,
    extra_indices: torch.Tensor | None,
    extra_topk_length: torch.Tensor | None,
    head_dim_v: int,
    scale: float,
    attn_sink: torch.Tensor | None,
    batch_invariant: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _allocate(q, head_dim_v)
