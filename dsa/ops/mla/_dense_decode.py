"""Dense MLA decoding: what `flash_mla_with_kvcache` does without indices, once its arguments are checked."""

import functools
import math
from collections.abc import Callable
from types import ModuleType

import torch

from dsa.kernels.mla.limits import (
    FIXED_SPLIT_TILES,
    HEAD_DIM,
    HEAD_DIM_V,
    MAX_FIXED_SPLITS,
    MAX_PARTS,
    PAGE_MULTIPLE,
    TILE_N,
)
from dsa.ops._aligned import rows_at_16_bytes
from dsa.ops._kernel_arguments import dtype_name, unit_inner
from dsa.ops.mla._sparse_attention import DTYPES, of_caller
from dsa.reference.checks import check_updatable
from dsa.reference.mla import flash_mla_with_kvcache as reference
from dsa.runtime.op import op

SHORT = 4  # tiles of a part, on an average, up to which decoding is short
# Rows of queries from which few CTAs combine what is short, and parts of a sequence up to which they do: more take too
# long one after the other.
FEW_CTAS_ROWS, FEW_CTAS_SPLITS = 256, 16


def _check_limits(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: torch.Tensor | None,
    softmax_scale: float,
) -> None:
    if k_cache.dtype != q.dtype:  # bytes
        raise ValueError(
            f"k_cache: the kernel takes q's dtype {dtype_name(q.dtype)} without indices, got "
            f"{dtype_name(k_cache.dtype)}"
        )
    if q.shape[3] != HEAD_DIM:
        raise ValueError(f"q: the kernel takes d = {HEAD_DIM}, got shape {list(q.shape)}")
    if head_dim_v != HEAD_DIM_V:
        raise ValueError(f"head_dim_v: the kernel takes {HEAD_DIM_V}, got {head_dim_v}")
    if k_cache.shape[1] % PAGE_MULTIPLE:
        raise ValueError(
            f"k_cache: the kernel takes pages of a multiple of {PAGE_MULTIPLE} keys, got {k_cache.shape[1]}"
        )
    if not 0 < softmax_scale < math.inf:
        raise ValueError(f"softmax_scale: the kernel takes a positive number, got {softmax_scale}")
    if tile_scheduler_metadata is not None and not 0 < (parts := len(tile_scheduler_metadata)) <= MAX_PARTS:
        raise ValueError(f"tile_scheduler_metadata: the kernel takes 1 to {MAX_PARTS} parts, got {parts}")


@op(
    arguments=reference.DENSE_MLA_DECODE.strict(),
    reference=reference.dense_mla_decode,
    results=lambda q, head_dim_v: (q.new_empty(*q.shape[:3], head_dim_v), _allocate_lse(q)),
    kernels={"sm_90": ("dsa.kernels.mla.mla_decode_sm90", "dsa.kernels.mla.mla_combine_sm90")},
    limits=_check_limits,
    dtypes=DTYPES,
    public="flash_mla_with_kvcache",
)
def _dense_mla_decode(
    kernels: tuple[ModuleType, ModuleType],
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: torch.Tensor | None,
    num_splits: torch.Tensor | None,
    softmax_scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `flash_mla_with_kvcache` does without indices. Without a plan: batch-invariant."""
    out, lse = q.new_empty(*q.shape[:3], head_dim_v), _allocate_lse(q)
    keys, plan = (k_cache, block_table, cache_seqlens), (tile_scheduler_metadata, num_splits)
    _decode(kernels, q, *keys, *plan, softmax_scale, causal, out, lse)
    return out, lse


def _reference_out(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    head_dim_v: int,
    softmax_scale: float,
    causal: bool,
    out: torch.Tensor,
) -> torch.Tensor:
    check_updatable("out", out)
    keys = (k_cache, block_table, cache_seqlens)
    given, lse = reference.dense_mla_decode(q, *keys, head_dim_v, softmax_scale, causal)
    out.copy_(given)
    return lse


@op(
    arguments=reference.DENSE_MLA_DECODE_OUT.strict(),
    reference=_reference_out,
    results=lambda q: _allocate_lse(q),
    kernels={"sm_90": ("dsa.kernels.mla.mla_decode_sm90", "dsa.kernels.mla.mla_combine_sm90")},
    limits=_check_limits,
    dtypes=DTYPES,
    public="flash_mla_with_kvcache",
)
def _dense_mla_decode_out(
    kernels: tuple[ModuleType, ModuleType],
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: torch.Tensor | None,
    num_splits: torch.Tensor | None,
    softmax_scale: float,
    causal: bool,
    out: torch.Tensor,
) -> torch.Tensor:
    """The same, written to `out`: -> lse."""
    lse = _allocate_lse(q)
    keys, plan = (k_cache, block_table, cache_seqlens), (tile_scheduler_metadata, num_splits)
    _decode(kernels, q, *keys, *plan, softmax_scale, causal, out, lse)
    return lse


def _allocate_lse(q: torch.Tensor) -> torch.Tensor:
    batch, s_q, h_q, _ = q.shape
    return q.new_empty(batch, h_q, s_q, dtype=torch.float32)


def _decode(
    kernels: tuple[ModuleType, ModuleType],
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    tile_scheduler_metadata: torch.Tensor | None,
    num_splits: torch.Tensor | None,
    softmax_scale: float,
    causal: bool,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    if 0 in (*q.shape[:3], len(k_cache), block_table.shape[1]):  # no query, or no key
        out.zero_()
        lse.fill_(torch.inf)
        return
    batch, s_q, h_q, _ = q.shape
    page_size, kv_heads = k_cache.shape[1:3]
    out = of_caller(out)
    aligned = rows_at_16_bytes(q)
    q = q.clone(memory_format=torch.contiguous_format) if aligned is None else aligned
    k_cache = rows_at_16_bytes(k_cache)
    rows = s_q * h_q // kv_heads
    capacity = min(block_table.shape[1] * page_size, 2**31 - TILE_N)
    plan, fixed_splits = tile_scheduler_metadata, 0
    if plan is None:
        fixed_splits = min(MAX_FIXED_SPLITS, -(-capacity // (TILE_N * FIXED_SPLIT_TILES)))
        plan, num_splits = cache_seqlens.new_empty(1, 8), cache_seqlens.new_empty(2)
    splits = batch * fixed_splits or 2 * plan.shape[0]
    out_partial = q.new_empty(splits, kv_heads, rows, HEAD_DIM_V, dtype=torch.float32)
    lse_partial = q.new_empty(splits, kv_heads, rows, dtype=torch.float32)
    # Two CTAs read the same keys once, which does not pay for a few tiles.
    tiles = -(-capacity // TILE_N)
    short = not fixed_splits and batch * tiles <= SHORT * plan.shape[0]
    decode = _decode_kernel(kernels[0], q.dtype, math.gcd(page_size, TILE_N), rows, short)
    # What is batch-invariant is added up in an order that follows from a sequence's rows alone.
    per_sequence, together = (MAX_FIXED_SPLITS, rows) if fixed_splits else (plan.shape[0] // batch, rows * batch)
    few = short and together >= FEW_CTAS_ROWS and min(per_sequence, tiles) <= FEW_CTAS_SPLITS
    combine = _combine_kernel(kernels[1], q.dtype, per_sequence, together, few)
    tensors = (cache_seqlens, plan, num_splits, out, lse, out_partial, lse_partial)
    options = softmax_scale * math.log2(math.e), causal, capacity, fixed_splits
    decode(q, k_cache, unit_inner(block_table), *tensors, *options)
    if fixed_splits != 1:
        combine(*tensors, capacity, fixed_splits)


@functools.cache
def _decode_kernel(kernels: ModuleType, dtype: torch.dtype, box: int, rows: int, short: bool) -> Callable[..., None]:
    return kernels.compile_mla_decode(dtype_name(dtype), box, 1 if short else kernels.cluster_of(rows))


@functools.cache
def _combine_kernel(kernels: ModuleType, dtype: torch.dtype, splits: int, rows: int, few: bool) -> Callable[..., None]:
    config = kernels.FEW if few else kernels.choose_config(splits, rows)
    return kernels.compile_mla_combine(dtype_name(dtype), config)
