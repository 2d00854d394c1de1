"""Dense MLA decoding: the op that `flash_mla_with_kvcache` calls if it gets no indices."""

import math

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
from dsa.ops.mla._latent_caches import OUT, check_latent_cache, latent_cache
from dsa.ops.mla._plans import check_plan
from dsa.ops.mla._sparse_attention import DTYPES, aligned, of_caller
from dsa.reference.mla import flash_mla_with_kvcache as reference
from dsa.runtime.declare import (
    CONTIGUOUS,
    FLOATS,
    INNER,
    INT32,
    POSITIVE,
    ROWS,
    Arguments,
    Flag,
    Int,
    Number,
    Tensor,
    at_most,
    dtype_name,
    multiple_of,
    op,
    rows_at_16_bytes,
    unit_inner,
)

SHORT = 4  # a call is short if the block table has at most this many key tiles per part of the plan, on average
# A short call with at least FEW_CTAS_ROWS rows (query, head) and at most FEW_CTAS_SPLITS splits per sequence runs the
# combine kernel with few CTAs. A CTA reads its splits one after another, so more splits need more CTAs.
FEW_CTAS_ROWS, FEW_CTAS_SPLITS = 256, 16


def _check_dense(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    tile_scheduler_metadata: torch.Tensor | None,
    num_splits: torch.Tensor | None,
) -> None:
    check_latent_cache("k_cache", k_cache, q)
    if q.shape[2] % k_cache.shape[2]:
        raise ValueError(f"k_cache: its h_k heads must divide q's h_q = {q.shape[2]}, got h_k = {k_cache.shape[2]}")
    check_plan(tile_scheduler_metadata, num_splits)


DENSE_MLA_DECODE = Arguments(
    rule=_check_dense,
    q=Tensor("B s_q h_q d", FLOATS),
    k_cache=latent_cache("pages P h_k row", layout=ROWS),
    block_table=Tensor("B max_pages", INT32, layout=INNER),
    cache_seqlens=Tensor("B", INT32),
    head_dim_v=Int(most="d"),
    tile_scheduler_metadata=Tensor("num_sm_parts 8", INT32, optional=True, layout=CONTIGUOUS),
    num_splits=Tensor("B+1", INT32, optional=True, layout=CONTIGUOUS),
    softmax_scale=Number(),
    causal=Flag(),
)


def _check_dtype(q: torch.Tensor, k_cache: torch.Tensor) -> None:
    if k_cache.dtype != q.dtype:  # a byte cache
        raise ValueError(
            f"k_cache: the kernel takes q's dtype {dtype_name(q.dtype)} without indices, got "
            f"{dtype_name(k_cache.dtype)}"
        )


def _allocate_out(q: torch.Tensor, head_dim_v: int) -> torch.Tensor:
    return q.new_empty(*q.shape[:3], head_dim_v)


def _allocate_lse(q: torch.Tensor) -> torch.Tensor:
    batch, s_q, h_q, _ = q.shape
    return q.new_empty(batch, h_q, s_q, dtype=torch.float32)


@op(
    arguments=DENSE_MLA_DECODE,
    reference=reference.dense_mla_decode,
    results=lambda q, head_dim_v: (_allocate_out(q, head_dim_v), _allocate_lse(q)),
    limits={
        "d": (HEAD_DIM,),
        "P": multiple_of(PAGE_MULTIPLE),
        "head_dim_v": (HEAD_DIM_V,),
        "num_sm_parts": at_most(MAX_PARTS, least=1),
        "softmax_scale": POSITIVE,
    },
    rule=_check_dtype,
    out=OUT,
    dtypes=DTYPES,
    public="flash_mla_with_kvcache",
)
def _dense_mla_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: torch.Tensor | None,
    num_splits: torch.Tensor | None,
    softmax_scale: float,
    causal: bool,
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Without a plan each sequence has a fixed number of splits, so the decoding is batch-invariant."""
    from dsa.kernels.mla.mla_combine_sm90 import FEW, choose_config, compile_mla_combine
    from dsa.kernels.mla.mla_decode_sm90 import cluster_of, compile_mla_decode

    out = _allocate_out(q, head_dim_v) if out is None else out
    lse = _allocate_lse(q)
    if 0 in (*q.shape[:3], len(k_cache), block_table.shape[1]):  # no queries or no keys
        return out.zero_(), lse.fill_(torch.inf)

    batch, s_q, h_q, _ = q.shape
    page_size, kv_heads = k_cache.shape[1:3]
    q = aligned(q)
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

    # The two CTAs of a cluster load shared keys once. For few tiles this saves less time than the cluster costs.
    tiles = -(-capacity // TILE_N)
    short = not fixed_splits and batch * tiles <= SHORT * plan.shape[0]
    cluster = 1 if short else cluster_of(rows)
    decode = compile_mla_decode(dtype_name(q.dtype), math.gcd(page_size, TILE_N), cluster)

    # The config determines the order in which splits are added. In batch-invariant decoding it must not depend on the
    # other sequences.
    per_sequence, together = (MAX_FIXED_SPLITS, rows) if fixed_splits else (plan.shape[0] // batch, rows * batch)
    few = short and together >= FEW_CTAS_ROWS and min(per_sequence, tiles) <= FEW_CTAS_SPLITS
    config = FEW if few else choose_config(per_sequence, together)
    combine = compile_mla_combine(dtype_name(q.dtype), config)

    tensors = (cache_seqlens, plan, num_splits, of_caller(out), lse, out_partial, lse_partial)
    scale = softmax_scale * math.log2(math.e)
    decode(q, k_cache, unit_inner(block_table), *tensors, scale, causal, capacity, fixed_splits)
    if fixed_splits != 1:
        combine(*tensors, capacity, fixed_splits)
    return out, lse
