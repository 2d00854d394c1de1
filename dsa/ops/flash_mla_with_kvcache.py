"""MLA decoding over a paged cache, dense or over selected keys, and its plan."""

import functools
import math
from collections.abc import Callable

import torch

from dsa import backends
from dsa.ops._kernel_arguments import check_rows, check_same_device, dtype_name
from reference import mla_decode as reference
from reference import mla_metadata

D, D_V, TILE, ROWS = 576, 512, 64, 64
DTYPES = (torch.bfloat16, torch.float16)
MAX_BATCH = 32768
SPLIT_TILES, MAX_SPLITS = 32, 32  # with batch_invariant; the kernels' numbers
OVERHEAD = 5  # of a piece of a sequence, in tiles


def get_mla_metadata(*args, **kwargs):
    if not args and not kwargs:
        return mla_metadata.FlashMLASchedMeta(), None
    return _plan_from_arguments(*args, **kwargs)


def _plan_from_arguments(
    cache_seqlens: torch.Tensor,
    num_q_tokens_per_head_k: int,
    num_heads_k: int,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    request = mla_metadata.check_metadata(cache_seqlens, num_q_tokens_per_head_k, num_heads_k, topk=topk)
    if topk is not None or not backends.runs_kernel("get_mla_metadata", cache_seqlens):
        return mla_metadata.plan_one_part(request)
    return _plan(cache_seqlens, num_q_tokens_per_head_k, num_heads_k)


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: mla_metadata.FlashMLASchedMeta | torch.Tensor | None,
    num_splits: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    arguments = (
        *(q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits, softmax_scale),
        *(causal, is_fp8_kvcache, indices, attn_sink, extra_k_cache, extra_indices_in_kvcache, topk_length),
        *(extra_topk_length, batch_invariant),
    )
    if not isinstance(q, torch.Tensor) or not backends.runs_kernel("flash_mla_with_kvcache", q):
        return reference.flash_mla_with_kvcache(*arguments)
    if indices is not None:
        backends.note_reference_only("flash_mla_with_kvcache with indices", q)
        return reference.flash_mla_with_kvcache(*arguments)
    unused = {"attn_sink": attn_sink, "topk_length": topk_length, "extra_k_cache": extra_k_cache}
    unused |= {"extra_indices_in_kvcache": extra_indices_in_kvcache, "extra_topk_length": extra_topk_length}
    reference.check_dense(
        *(q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits, causal),
        *(is_fp8_kvcache, unused),
    )
    if q.shape[0] * q.shape[1] * q.shape[2] * k_cache.shape[0] * block_table.shape[1] == 0:
        return reference.flash_mla_with_kvcache(*arguments)
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    _check_kernel_takes(q, k_cache, block_table, cache_seqlens, head_dim_v, scale)
    rows, kv_heads = q.shape[1] * q.shape[2] // k_cache.shape[2], k_cache.shape[2]
    plan = None
    if not batch_invariant:
        if isinstance(tile_scheduler_metadata, torch.Tensor):
            plan = tile_scheduler_metadata, num_splits
        else:
            meta = tile_scheduler_metadata
            if meta is None or meta.tile_scheduler_metadata is None:
                plan = _plan(cache_seqlens, rows, kv_heads)
                if meta is not None:
                    meta.tile_scheduler_metadata, meta.num_splits = plan
            else:
                plan = meta.tile_scheduler_metadata, meta.num_splits
    return _dense(q, k_cache, block_table, cache_seqlens, plan, scale, causal)


def _plan(cache_seqlens: torch.Tensor, rows: int, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    batch = cache_seqlens.shape[0]
    parts = max(1, backends.num_sms(cache_seqlens.device) // (kv_heads * -(-rows // ROWS)))
    plan = torch.empty(parts, 8, dtype=torch.int32, device=cache_seqlens.device)
    num_splits = torch.empty(batch + 1, dtype=torch.int32, device=cache_seqlens.device)
    with backends.on_device(cache_seqlens):
        _plan_kernel()(cache_seqlens, plan, num_splits, OVERHEAD)
    return plan, num_splits


def _dense(q, k_cache, block_table, cache_seqlens, plan, scale, causal):
    batch, s_q, h_q, _ = q.shape
    page_size, kv_heads = k_cache.shape[1:3]
    rows = s_q * h_q // kv_heads
    fixed = 0
    if plan is None:
        fixed = min(MAX_SPLITS, -(-block_table.shape[1] * page_size // (TILE * SPLIT_TILES)))
        plan = q.new_empty(1, 8, dtype=torch.int32), q.new_empty(batch + 1, dtype=torch.int32)
    slots = batch * fixed if fixed else 2 * plan[0].shape[0]
    out = q.new_empty(batch, s_q, h_q, D_V)
    lse = q.new_empty(batch, h_q, s_q, dtype=torch.float32)
    out_parts = q.new_empty(slots, kv_heads, rows, D_V, dtype=torch.float32)
    lse_parts = q.new_empty(slots, kv_heads, rows, dtype=torch.float32)
    kernel, combine = _kernels(q.dtype, math.gcd(page_size, TILE), rows, slots // batch, batch)
    with backends.on_device(q):
        kernel(
            *(q, k_cache, block_table, cache_seqlens, *plan, out, lse, out_parts, lse_parts),
            *(scale * math.log2(math.e), int(causal), fixed),
        )
        if fixed != 1:
            combine(
                *(cache_seqlens, *plan, out, lse, out_parts, lse_parts),
                *(block_table.shape[1] * page_size, fixed),
            )
    return out, lse


@functools.cache
def _plan_kernel() -> Callable[..., None]:
    from dsa.kernels.mla_plan_sm90 import compile_mla_plan

    return compile_mla_plan()


@functools.cache
def _kernels(dtype: torch.dtype, box: int, rows: int, splits: int, batch: int):
    from dsa.kernels import mla_combine_sm90, mla_decode_sm90

    name = dtype_name(dtype)
    combine = mla_combine_sm90.compile_mla_combine(name, mla_combine_sm90.choose_config(splits, rows * batch))
    return mla_decode_sm90.compile_mla_decode(name, box, mla_decode_sm90.choose_config(rows)), combine


def _check_kernel_takes(q, k_cache, block_table, cache_seqlens, head_dim_v, scale) -> None:
    if q.dtype not in DTYPES or k_cache.dtype != q.dtype:
        raise ValueError(f"q: the Hopper kernel takes bfloat16 or float16, the same as k_cache, got {q.dtype} and {k_cache.dtype}")
    if q.shape[3] != D or head_dim_v != D_V:
        raise ValueError(f"q: the Hopper kernel takes d = {D} with head_dim_v = {D_V}, got {q.shape[3]} with {head_dim_v}")
    if k_cache.shape[1] % 16:
        raise ValueError(f"k_cache: the Hopper kernel takes pages of a multiple of 16 keys, got {k_cache.shape[1]}")
    check_rows("k_cache", k_cache)
    check_rows("q", q)
    if not 0 < scale < math.inf:
        raise ValueError(f"softmax_scale: the Hopper kernel takes a positive number, got {scale}")
    check_same_device(("q", q), k_cache=k_cache, block_table=block_table, cache_seqlens=cache_seqlens)
