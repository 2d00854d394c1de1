"""MLA decoding over a paged cache, dense or over selected keys, and its plan."""

import functools
import math
from collections.abc import Callable

import torch

from dsa import backends
from dsa.kernels.mla.limits import (
    FIXED_SPLIT_TILES,
    HEAD_DIM,
    HEAD_DIM_V,
    MAX_BATCH,
    MAX_FIXED_SPLITS,
    MAX_PARTS,
    PAGE_MULTIPLE,
    TILE_M,
    TILE_N,
)
from dsa.ops._aligned import rows_at_16_bytes
from dsa.ops._kernel_arguments import dtype_name, unit_inner
from dsa.ops.known_calls import KnownCalls, signature
from dsa.ops.mla import _sparse_decode
from dsa.ops.mla._sparse_attention import DTYPES
from dsa.reference.checks import check_same_dtype
from dsa.reference.mla import flash_mla_with_kvcache as reference
from dsa.reference.mla import mla_metadata
from dsa.reference.mla.mla_metadata import FlashMLASchedMeta

__all__ = ["FlashMLASchedMeta", "flash_mla_with_kvcache", "get_mla_metadata"]

OVERHEAD = 5  # what beginning a sequence costs, in tiles


def get_mla_metadata(*args, **kwargs) -> tuple[FlashMLASchedMeta, None] | tuple[torch.Tensor, torch.Tensor]:
    """A plan for `flash_mla_with_kvcache`, to be passed as its `tile_scheduler_metadata` and `num_splits`.

    New style, no arguments: (FlashMLASchedMeta(), None). The first call that gets the object makes the plan and leaves
    it there, with the call's shapes; later calls with the same shapes use it.

    Old style, (cache_seqlens, num_q_tokens_per_head_k, num_heads_k, num_heads_q=None, is_fp8_kvcache=False, topk=None)
    by position or by name: (tile_scheduler_metadata [num_sm_parts, 8] int32, num_splits [B + 1] int32).
      cache_seqlens            [B] int32, cached keys per sequence, B at most 32768 on Hopper
      num_q_tokens_per_head_k  s_q * h_q / h_k
      topk                     None, or the keys that every query selects
    A row of the first is one part of the GPU: its first sequence, the tile of 64 keys where it begins there, its last
    sequence, the tile where it stops there (2^30: the end, wherever that is then), how many splits of its first
    sequence are before it; then, of row i, the i-th sequence that is split, or -1; two unused numbers. num_splits
    counts the splits of the split sequences before each sequence.

    A plan says where long sequences are cut, nothing else: made for other lengths, of as many sequences, it gives the
    right result, less well balanced. So a plan outside a CUDA graph serves all its replays; made inside, it follows
    the lengths. Numbers that are no plan lead outside no tensor, but may leave out sequences, whose results are then
    unspecified. One kernel, no host synchronisation.
    Raises TypeError or ValueError for other types, dtypes and shapes. Source: FlashMLA's function of this name.
    """
    if not args and not kwargs:
        return FlashMLASchedMeta(), None
    request = mla_metadata.check_metadata(*args, **kwargs)
    if request.topk is not None:
        return mla_metadata.plan_one_part(request)
    return _plan(request.cache_seqlens, request.num_q_tokens_per_head_k, request.num_heads_k)


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta | torch.Tensor | None,
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
    """out = softmax_j(softmax_scale * q . k_j) k_j[:head_dim_v] over the keys j of each query.

    q              [B, s_q, h_q, d] bf16 or fp16; fp32 runs the PyTorch reference, with a warning on Hopper
    k_cache        [pages, P, h_k, d] in q's dtype, or with is_fp8_kvcache [pages, P, 1, 656 | 584] bytes as
                   `write_kv_cache` lays them out (d = 576 or 512). h_k divides h_q; query head h reads key head
                   h // (h_q / h_k). A value is the first head_dim_v numbers of its key
    head_dim_v     at most d
    tile_scheduler_metadata, num_splits  from `get_mla_metadata` in either style, or None: planned here. A
                   FlashMLASchedMeta may be used again with the same shapes only
    softmax_scale  multiplies the logits: a finite number, or None: d^-0.5
    batch_invariant  True: a sequence's result does not depend on the other sequences, bit for bit. Dense, its splits
                   then follow from its length alone (at least 4096 keys each, at most 32), and the plan is not used;
                   sparse, a query is not split. False: the result depends on the plan, or on the number of queries, by
                   rounding, and is the same from run to run

    Dense, if indices is None:
    block_table    [B, max_pages] int32: key s is at offset s % P of page block_table[b, s // P]. Entries past the
                   sequence mean nothing; a page outside the cache holds no keys and is not read
    cache_seqlens  [B] int32, keys per sequence, 0 included
    causal         True: query i sees the first cache_seqlens - s_q + i + 1 keys. False: it sees all of them

    Sparse (h_k = 1, causal False; block_table, cache_seqlens and the plan are not used):
    indices        [B, s_q, K] int32, page * P + offset; negative or outside the cache is no key. A key named twice
                   counts twice
    topk_length    [B] int32 or None: only the first topk_length[b] indices count
    attn_sink      [h_q] fp32 or None, any value from -inf to +inf: out is scaled by e^lse / (e^lse + e^sink)
    extra_k_cache, extra_indices_in_kvcache [B, s_q, K2], extra_topk_length [B]  a second cache, of its own layout and
                   page size, whose selected keys join the same softmax

    Returns out [B, s_q, h_q, head_dim_v] in q's dtype, contiguous, and lse [B, h_q, s_q] fp32 (natural log, without
    the sink). A query without keys has out 0 and lse +inf. Unused cache rows may hold NaN; dense, NaN in a key that one
    query of a sequence sees may reach, on Hopper, the sequence's other queries.
    Raises TypeError or ValueError for other types, dtypes, shapes, strides, devices and combinations.
    On Hopper, dense: d = 576 with head_dim_v = 512, any number of heads and queries, pages of a multiple of 16 keys
    (64 and more best), any strides of q, cache rows at multiples of 16 bytes, softmax_scale above 0, caches beyond 2^31
    bytes. Logits and sums are fp32; softmax weights are rounded to q's dtype before they meet the values.
    On Hopper, sparse: d = 576 or 512 with head_dim_v = 512, any number of heads, queries and indices, pages of any
    size, keys at multiples of 16 bytes; or with bf16 q pages of bytes, each contiguous and at a multiple of 16 bytes:
    for the logits their numbers are exact and multiplied by the fp32 scales in fp32; as values they are rounded to
    fp16's 11 bits after the scale, relative to the key's largest scale: 2^-22 of that is the most that can be lost.
    Deterministic. CUDA-graph safe with new lengths and indices, no host synchronisation. Workspace: at most two partial
    results a multiprocessor, or, dense with batch_invariant, one a sequence and split.
    Source: FlashMLA's function of this name, which takes fewer caches, head counts and combinations.
    """
    if not isinstance(q, torch.Tensor) or q.dtype == torch.float32:
        if isinstance(q, torch.Tensor):
            for name, cache in (("k_cache", k_cache), ("extra_k_cache", extra_k_cache)):
                if isinstance(cache, torch.Tensor) and cache.dtype in DTYPES:
                    check_same_dtype(("q", q), **{name: cache})
            backends.note_reference_only("flash_mla_with_kvcache in float32", q)
        return reference.flash_mla_with_kvcache(
            *(q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits, softmax_scale),
            *(causal, is_fp8_kvcache, indices, attn_sink, extra_k_cache, extra_indices_in_kvcache, topk_length),
            *(extra_topk_length, batch_invariant),
        )
    plan = (tile_scheduler_metadata, num_splits)
    scale = softmax_scale
    if scale is None and q.dim() == 4 and not q.is_nested and q.shape[3]:
        scale = q.shape[3] ** -0.5
    flags = (causal, is_fp8_kvcache)
    if indices is not None:
        selections = ((k_cache, indices, topk_length), (extra_k_cache, extra_indices_in_kvcache, extra_topk_length))
        return _sparse(q, *selections, head_dim_v, plan, scale, flags, attn_sink, batch_invariant)
    unused = (attn_sink, extra_k_cache, extra_indices_in_kvcache, topk_length, extra_topk_length)
    dense = (q, k_cache, block_table, cache_seqlens, head_dim_v)
    return _dense(dense, plan, scale, flags, unused, batch_invariant)


_UNUSED = ("attn_sink", "extra_k_cache", "extra_indices_in_kvcache", "topk_length", "extra_topk_length")
_known_calls = KnownCalls()


def _known(arguments: tuple, meta: FlashMLASchedMeta | torch.Tensor | None) -> tuple[tuple | None, dict | None]:
    """The call's signature, and what is known about it: nothing if the plan was made for another."""
    if torch.compiler.is_compiling():
        return None, None
    call = signature(backends.runs_kernel("flash_mla_with_kvcache", arguments[0]), meta, *arguments)
    config = _known_calls.get(call)
    return call, config if getattr(meta, "config", None) in (None, config) else None


def _dense(
    dense: tuple,
    plan: tuple[FlashMLASchedMeta | torch.Tensor | None, torch.Tensor | None],
    scale: float,
    flags: tuple[bool, bool],
    unused: tuple,
    batch_invariant: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    call, config = _known((*dense, plan[1], scale, *flags, batch_invariant, *unused), plan[0])
    if config is None:
        config = reference.check_dense(*dense, *plan, *flags, scale, batch_invariant, dict(zip(_UNUSED, unused)))
        if call is not None:
            if backends.runs_kernel("flash_mla_with_kvcache", dense[0]):
                # Before a plan is made: a call that fails must not leave one behind.
                _check_kernel_takes(*dense, scale, *plan)
            _known_calls.remember(call, config)
    meta = plan[0]
    mla_metadata.remember_config(meta, config)
    q, k_cache, block_table, cache_seqlens, _ = dense
    if batch_invariant or _is_empty(q, k_cache, block_table):
        plan = (None, None)
    elif not isinstance(meta, torch.Tensor):
        plan = _plan_of(meta, cache_seqlens, q.shape[1] * q.shape[2] // k_cache.shape[2], k_cache)
    compiling = torch.compiler.is_compiling()
    return (torch.ops.dsa.dense_mla_decode if compiling else _decode)(*dense, *plan, scale, flags[0])


def _sparse(
    q: torch.Tensor,
    selection: tuple,
    extra: tuple,
    head_dim_v: int,
    plan: tuple[FlashMLASchedMeta | torch.Tensor | None, torch.Tensor | None],
    scale: float,
    flags: tuple[bool, bool],
    attn_sink: torch.Tensor | None,
    batch_invariant: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    call, config = _known(
        (q, *selection, *extra, head_dim_v, plan[1], scale, *flags, batch_invariant, attn_sink), plan[0]
    )
    if config is None:
        config = reference.check_sparse(
            q, selection, extra, head_dim_v, *plan, *flags, scale, batch_invariant, attn_sink
        )
        if call is not None:
            if backends.runs_kernel("flash_mla_with_kvcache", q):
                _sparse_decode.check_kernel_takes(q, (selection, extra), head_dim_v, scale)
            _known_calls.remember(call, config)
    mla_metadata.remember_config(plan[0], config)
    arguments = (q, *selection, *extra, head_dim_v, scale, attn_sink, batch_invariant)
    compiling = torch.compiler.is_compiling()
    return (torch.ops.dsa.sparse_mla_decode if compiling else _sparse_decode.decode)(*arguments)


def _is_empty(q: torch.Tensor, k_cache: torch.Tensor, block_table: torch.Tensor) -> bool:
    """No query, or no key."""
    return 0 in (*q.shape[:3], k_cache.shape[0], block_table.shape[1])


def _plan_of(
    meta: FlashMLASchedMeta | None, cache_seqlens: torch.Tensor, rows: int, k_cache: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the object remembers, or a plan, which it then remembers."""
    if meta is not None and meta.tile_scheduler_metadata is not None:
        return meta.tile_scheduler_metadata, meta.num_splits
    plan = _plan(cache_seqlens, rows, k_cache.shape[2])
    if meta is not None:
        meta.tile_scheduler_metadata, meta.num_splits = plan
    return plan


def _plan(cache_seqlens: torch.Tensor, rows: int, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    if torch.compiler.is_compiling():
        return torch.ops.dsa.mla_metadata(cache_seqlens, rows, kv_heads)
    return _metadata(cache_seqlens, rows, kv_heads)


def _metadata(cache_seqlens: torch.Tensor, rows: int, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    if not backends.runs_kernel("get_mla_metadata", cache_seqlens):
        return mla_metadata.plan_one_part(mla_metadata.check_metadata(cache_seqlens, rows, kv_heads))
    batch = cache_seqlens.shape[0]
    if batch > MAX_BATCH:
        raise ValueError(f"cache_seqlens: the Hopper kernel plans for at most {MAX_BATCH} sequences, got {batch}")
    plan = torch.empty(_parts(cache_seqlens, rows, kv_heads), 8, dtype=torch.int32, device=cache_seqlens.device)
    num_splits = torch.empty(batch + 1, dtype=torch.int32, device=cache_seqlens.device)
    if batch == 0:
        return plan.fill_(-1), num_splits.zero_()
    with backends.on_device(cache_seqlens):
        _plan_kernel()(cache_seqlens, plan, num_splits, OVERHEAD)
    return plan, num_splits


def _parts(cache_seqlens: torch.Tensor, rows: int, kv_heads: int) -> int:
    return max(1, backends.num_sms(cache_seqlens.device) // (kv_heads * -(-rows // TILE_M)))


def _decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    head_dim_v: int,
    plan: torch.Tensor | None,
    num_splits: torch.Tensor | None,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of checked arguments. Without a plan: batch-invariant."""
    if not backends.runs_kernel("flash_mla_with_kvcache", q):
        out, lse = reference.decode_dense(q, k_cache, block_table, cache_seqlens, head_dim_v, scale, causal)
        return out.to(q.dtype), lse
    batch, s_q, h_q, _ = q.shape
    page_size, kv_heads = k_cache.shape[1:3]
    out, lse = _allocate(q, head_dim_v)
    if _is_empty(q, k_cache, block_table):
        return out.zero_(), lse.fill_(torch.inf)
    aligned = rows_at_16_bytes(q)
    q = q.clone(memory_format=torch.contiguous_format) if aligned is None else aligned
    k_cache = rows_at_16_bytes(k_cache)
    rows = s_q * h_q // kv_heads
    capacity = min(block_table.shape[1] * page_size, 2**31 - TILE_N)
    fixed_splits = 0
    if plan is None:
        fixed_splits = min(MAX_FIXED_SPLITS, -(-capacity // (TILE_N * FIXED_SPLIT_TILES)))
        plan, num_splits = cache_seqlens.new_empty(1, 8), cache_seqlens.new_empty(2)
    splits = batch * fixed_splits or 2 * plan.shape[0]
    out_partial = q.new_empty(splits, kv_heads, rows, head_dim_v, dtype=torch.float32)
    lse_partial = q.new_empty(splits, kv_heads, rows, dtype=torch.float32)
    decode = _decode_kernel(q.dtype, math.gcd(page_size, TILE_N), rows)
    # What is batch-invariant is added up in an order that follows from a sequence's rows alone.
    per_sequence, together = (MAX_FIXED_SPLITS, rows) if fixed_splits else (plan.shape[0] // batch, rows * batch)
    combine = _combine_kernel(q.dtype, per_sequence, together)
    tensors = (cache_seqlens, plan, num_splits, out, lse, out_partial, lse_partial)
    with backends.on_device(q):
        decode(q, k_cache, unit_inner(block_table), *tensors, scale * math.log2(math.e), causal, capacity, fixed_splits)
        if fixed_splits != 1:
            combine(*tensors, capacity, fixed_splits)
    return out, lse


def _checked_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    head_dim_v: int,
    plan: torch.Tensor | None,
    num_splits: torch.Tensor | None,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`_decode` as torch.compile calls it: addresses and strides are known only now."""
    if backends.runs_kernel("flash_mla_with_kvcache", q):
        _check_kernel_takes(q, k_cache, block_table, cache_seqlens, head_dim_v, scale, plan, num_splits)
    return _decode(q, k_cache, block_table, cache_seqlens, head_dim_v, plan, num_splits, scale, causal)


def _allocate(q: torch.Tensor, head_dim_v: int) -> tuple[torch.Tensor, torch.Tensor]:
    batch, s_q, h_q, _ = q.shape
    return q.new_empty(batch, s_q, h_q, head_dim_v), q.new_empty(batch, h_q, s_q, dtype=torch.float32)


@functools.cache
def _plan_kernel() -> Callable[..., None]:
    from dsa.kernels.mla.mla_plan_sm90 import compile_mla_plan

    return compile_mla_plan()


@functools.cache
def _decode_kernel(dtype: torch.dtype, box: int, rows: int) -> Callable[..., None]:
    from dsa.kernels.mla import mla_decode_sm90 as kernels

    return kernels.compile_mla_decode(dtype_name(dtype), box, kernels.cluster_of(rows))


@functools.cache
def _combine_kernel(dtype: torch.dtype, splits: int, rows: int) -> Callable[..., None]:
    from dsa.kernels.mla import mla_combine_sm90 as kernels

    return kernels.compile_mla_combine(dtype_name(dtype), kernels.choose_config(splits, rows))


def _check_kernel_takes(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    head_dim_v: int,
    scale: float,
    plan: FlashMLASchedMeta | torch.Tensor | None,
    num_splits: torch.Tensor | None,
) -> None:
    if k_cache.dtype != q.dtype:  # bytes
        raise ValueError(
            f"k_cache: the Hopper kernel takes q's dtype {dtype_name(q.dtype)} without indices, got "
            f"{dtype_name(k_cache.dtype)}"
        )
    if q.shape[3] != HEAD_DIM:
        raise ValueError(f"q: the Hopper kernel takes d = {HEAD_DIM}, got shape {list(q.shape)}")
    if head_dim_v != HEAD_DIM_V:
        raise ValueError(f"head_dim_v: the Hopper kernel takes {HEAD_DIM_V}, got {head_dim_v}")
    if k_cache.shape[1] % PAGE_MULTIPLE:
        raise ValueError(
            f"k_cache: the Hopper kernel takes pages of a multiple of {PAGE_MULTIPLE} keys, got {k_cache.shape[1]}"
        )
    if rows_at_16_bytes(k_cache) is None and k_cache.numel():
        raise ValueError(
            "k_cache: channels must be contiguous and keys start at multiples of 16 bytes, got strides "
            f"{list(k_cache.stride())} and an address {k_cache.data_ptr() % 16} bytes past one"
        )
    if block_table.shape[1] > 1 and block_table.stride(1) != 1:
        raise ValueError(f"block_table: rows must be contiguous, got strides {list(block_table.stride())}")
    if not 0 < scale < math.inf:
        raise ValueError(f"softmax_scale: the Hopper kernel takes a positive number, got {scale}")
    if isinstance(plan, torch.Tensor):
        if not 0 < plan.shape[0] <= MAX_PARTS:
            raise ValueError(
                f"tile_scheduler_metadata: the Hopper kernel takes 1 to {MAX_PARTS} parts, got {plan.shape[0]}"
            )
        for name, x in (("tile_scheduler_metadata", plan), ("num_splits", num_splits)):
            if not x.is_contiguous():
                raise ValueError(f"{name}: must be contiguous, got strides {list(x.stride())}")


torch.library.custom_op("dsa::mla_metadata", mutates_args=())(_metadata)
torch.library.custom_op("dsa::dense_mla_decode", mutates_args=())(_checked_decode)


@torch.library.register_fake("dsa::mla_metadata")
def _(cache_seqlens: torch.Tensor, rows: int, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    parts = _parts(cache_seqlens, rows, kv_heads) if backends.runs_kernel("get_mla_metadata", cache_seqlens) else 1
    return cache_seqlens.new_empty(parts, 8), cache_seqlens.new_empty(cache_seqlens.shape[0] + 1)


@torch.library.register_fake("dsa::dense_mla_decode")
def _(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    head_dim_v: int,
    plan: torch.Tensor | None,
    num_splits: torch.Tensor | None,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _allocate(q, head_dim_v)
