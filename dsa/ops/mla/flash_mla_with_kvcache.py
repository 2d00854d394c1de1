"""MLA decoding over a paged cache, with all keys (dense) or selected keys (sparse), and the plan of dense decoding."""

import functools
from typing import Any

import torch

from dsa.kernels.mla.limits import MAX_BATCH, PLAN_COLUMNS, PLAN_NUMBERS, TILE_M, TILE_N
from dsa.ops.mla._dense_decode import SHORT, _dense_mla_decode
from dsa.ops.mla._latent_caches import check_layout_flag, check_unused
from dsa.ops.mla._plans import (
    MLA_METADATA,
    Plan,
    bind_plan,
    check_plan,
    check_plan_tensors,
    metadata_request,
    own_plan,
)
from dsa.ops.mla._sparse_attention import DTYPES
from dsa.ops.mla._sparse_decode import _sparse_mla_decode
from dsa.reference.mla.mla_metadata import FlashMLASchedMeta, plan_one_part
from dsa.runtime import backends
from dsa.runtime.declare import Op, at_most, check_apart, check_flag, check_memory, op, shape_of

__all__ = ["FlashMLASchedMeta", "flash_mla_with_kvcache", "get_mla_metadata"]

# Fixed cost per sequence, in key tiles, with which the plan is made. It depends on tiles / parts: the block table's key
# tiles per part of the plan. OVERHEAD_OF_SHORT is for at most HALVED, and OVERHEAD_OF_LONG for more than SHORT if
# sequences are split. OVERHEAD is for all other cases, and for the old style, which does not know the block table.
OVERHEAD, OVERHEAD_OF_LONG, OVERHEAD_OF_SHORT = 5, 2, 0
# Up to HALVED tiles per part, decoding on half of the SMs is faster than on all, because the combine kernel can start
# on the other SMs.
HALVED = 2
_SPARSE_ONLY = ("attn_sink", "topk_length", "extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length")


def get_mla_metadata(*args, **kwargs) -> tuple[FlashMLASchedMeta, None] | tuple[torch.Tensor, torch.Tensor]:
    """Return a plan for `flash_mla_with_kvcache`, to be passed as its `tile_scheduler_metadata` and `num_splits`.

    New style, without arguments: returns (FlashMLASchedMeta(), None). The first call of `flash_mla_with_kvcache` that
    gets the object stores the call's shapes in it, and later calls must have the same shapes. The first dense call
    without enable_batch_invariant also makes a plan and stores it, and later dense calls without enable_batch_invariant
    use this plan.

    Old style, (cache_seqlens, num_q_tokens_per_head_k, num_heads_k, num_heads_q=None, is_fp8_kvcache=False, topk=None)
    by position or by name: returns (tile_scheduler_metadata [num_sm_parts, 8] int32, num_splits [B + 1] int32).
      cache_seqlens            [B] int32, cached keys per sequence, B at most 32768 on Hopper
      num_q_tokens_per_head_k  s_q * h_q / h_k
      num_heads_k              h_k
      topk                     None, or how many keys every query selects: the plan then has one part, because sparse
                               decoding does not use it
    A row of tile_scheduler_metadata describes the work of one part of the GPU: the first sequence; the tile of 64 keys
    of this sequence where the work begins; the last sequence; the tile of this sequence where the work ends (2^30: at
    the end of the sequence, even if its length changes later); how many splits of the first sequence belong to earlier
    parts; in row i the i-th sequence that is split, or -1; and two unused zeros. num_splits[b] counts the splits of all
    sequences before b that are split.

    A plan only determines how the sequences are divided among the parts. So a plan for other lengths of the same number
    of sequences also gives right results, but divides the work less evenly, and a plan that was made outside a CUDA
    graph serves all replays of the graph. A plan that is made inside a graph is computed at every replay, from the
    lengths at that time. Before the first replay its memory is not initialised, so a call outside the graph with the
    same FlashMLASchedMeta, or in another graph, makes a new plan. The plan is made on the stream of the call that makes
    it. A call on another stream must wait until the plan is made. Otherwise the call can read numbers that are not a
    plan yet: its results are then unspecified, but no kernel reads or writes outside its tensors. In the new style, and
    without a plan, the block table bounds the number of keys. This bound sets the number of parts (fewer for few keys)
    and the fixed cost per sequence (lower for few keys, and for long sequences that are split). The old style does not
    know the bound, so results of the two styles may differ in rounding.
    On Hopper: one kernel, no host synchronisation.
    Raises TypeError or ValueError for other types, dtypes and shapes. Source: FlashMLA's function of this name.
    """
    if not args and not kwargs:
        return FlashMLASchedMeta(), None
    request = metadata_request(*args, **kwargs)
    arguments = (request.cache_seqlens, request.num_q_tokens_per_head_k, request.num_heads_k, 0)
    if request.topk is None:
        return _mla_metadata(*arguments)
    MLA_METADATA.check(*arguments)
    check_memory("cache_seqlens", request.cache_seqlens)
    return plan_one_part(request.cache_seqlens)


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
    out: torch.Tensor | None = None,
    enable_batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out = sum_j softmax_j(softmax_scale * q . k_j) k_j[:head_dim_v] per query and head, over the keys j of the query.

    q              [B, s_q, h_q, d] bf16 or fp16; fp32 runs the PyTorch reference, with a warning on Hopper
    k_cache        [pages, P, h_k, d] in q's dtype, or with is_fp8_kvcache [pages, P, 1, 656 | 584] bytes as
                   `write_kv_cache` lays them out (d = 576 or 512). h_k divides h_q; query head h reads key head
                   h // (h_q / h_k). A value is the first head_dim_v numbers of its key
    head_dim_v     at most d
    tile_scheduler_metadata, num_splits  from `get_mla_metadata` in either style, or None: the op makes a plan. A
                   FlashMLASchedMeta may be used again only with the same shapes. The same holds for an object of
                   another library's class with the fields of FlashMLASchedMeta, such as FlashMLA's class: the op stores
                   its plan in an extra attribute of the object, and neither reads nor writes the other fields
    softmax_scale  multiplies the logits: a finite number, or None: d^-0.5
    out            None, or a tensor [B, s_q, h_q, head_dim_v] of q's dtype and device: the op writes every number of
                   it, and nothing between its rows. On Hopper the heads of a query must be contiguous and start at a
                   multiple of 16 bytes; the strides of sequences and queries are free, as in a slice of a tensor with
                   more heads. out must not begin at the address of q or a cache. If it overlaps an input elsewhere, the
                   contents of the overlap are undefined
    enable_batch_invariant  True: a sequence's result does not depend on the other sequences, bit for bit. In dense
                   decoding the splits of a sequence then depend only on its length (at most 32 splits of at least 4096
                   keys), and the plan is not used. In sparse decoding no query is split then, and without topk_length a
                   query's result does not depend on the other queries of its sequence either. False: the rounding of a
                   result depends on the plan, or in sparse decoding on the number of queries, but not on the run

    Dense decoding, if indices is None:
    block_table    [B, max_pages] int32: key s is at offset s % P of page block_table[b, s // P]. Entries past the
                   sequence are ignored; a page outside the cache counts as one without keys and is not read
    cache_seqlens  [B] int32, keys per sequence, 0 included
    causal         True: query i sees the first cache_seqlens - s_q + i + 1 keys. False: it sees all of them

    Sparse decoding, if indices are given (h_k = 1, causal False; block_table, cache_seqlens and the plan are not used):
    indices        [B, s_q, K] int32, page * P + offset; indices that are negative or outside the cache are ignored. A
                   key that is selected twice counts twice
    topk_length    [B] int32 or None: only the first topk_length[b] indices count
    attn_sink      [h_q] fp32 or None, any value from -inf to +inf: out is scaled by e^lse / (e^lse + e^sink)
    extra_k_cache, extra_indices_in_kvcache [B, s_q, K2], extra_topk_length [B]  a second cache, whose layout and page
                   size may differ from the first one's; its selected keys are part of the same softmax

    Returns out [B, s_q, h_q, head_dim_v] in q's dtype, which is `out` if that was given and a new contiguous tensor
    otherwise, and lse [B, h_q, s_q] fp32 (natural log, without the sink): contiguous, or in sparse decoding a view of
    [B, s_q, h_q]. A query without keys has out 0 and lse +inf. Unused cache rows may contain NaN. In dense decoding on
    Hopper, a NaN in a key that one query of a sequence sees can reach the other queries of the sequence.
    Raises TypeError or ValueError for other types, dtypes, shapes, strides, devices and combinations.
    On Hopper, dense: d = 576 with head_dim_v = 512, any number of heads and queries, pages of a multiple of 16 keys (64
    and more are fastest), any strides of q, cache rows at multiples of 16 bytes, softmax_scale above 0, caches beyond
    2^31 bytes. Logits and sums are fp32; softmax weights are rounded to q's dtype before the values are multiplied by
    them.
    On Hopper, sparse: d = 576 or 512 with head_dim_v = 512, or, without a second cache, d = 160 with head_dim_v = 128
    (A.X-K2-Light); any number of heads, queries and indices, pages of any size, keys at multiples of 16 bytes; or, with
    bf16 q and d = 576 or 512, a byte cache in which each page is contiguous and starts at a
    multiple of 16 bytes. In the logits of a byte cache, products with e4m3 numbers are exact and are multiplied by the
    fp32 scales in fp32. For the values, the e4m3 numbers are multiplied by their scale and rounded to the 11 bits of
    fp16. If the scale of a group of channels is below 2^-20 of the key's largest scale, the group's values have an
    additional error of up to 2^-22 of the largest scale.
    No gradients on Hopper, even if q or a cache requires them. Deterministic. CUDA-graph safe with new lengths and
    indices, no host synchronisation. The workspace is at most two partial results (fp32 out and lse of up to 64 rows)
    per SM; in dense decoding with enable_batch_invariant it is one partial result per sequence and split.
    Source: FlashMLA's function of this name, which accepts fewer caches, numbers of heads and combinations.
    """
    meta = own_plan(tile_scheduler_metadata)
    extra = (extra_k_cache, extra_indices_in_kvcache, extra_topk_length)
    _check_options(k_cache, extra_k_cache, indices, (meta, num_splits), causal, is_fp8_kvcache, enable_batch_invariant)
    scale = _scale_of(q, softmax_scale)
    written = () if out is None else (out,)
    if out is not None:
        check_apart("out", out, q=q, k_cache=k_cache, extra_k_cache=extra_k_cache)
    if indices is not None:
        check_plan_tensors(meta, num_splits, q)
        decode = _sparse_mla_decode if out is None else _sparse_mla_decode.into
        options = (head_dim_v, scale, attn_sink, enable_batch_invariant)
        sparse = (q, k_cache, indices, topk_length, *extra, *options, *written)
        if isinstance(meta, FlashMLASchedMeta):
            config = _config_of(q, causal, (k_cache, indices), extra[:2])
            _bind(meta, config, decode, sparse, planned=True)
        return decode(*sparse) if out is None else (out, decode(*sparse))
    check_unused(dict(zip(_SPARSE_ONLY, (attn_sink, topk_length, *extra))), "indices")
    dense, options = (q, k_cache, block_table, cache_seqlens, head_dim_v), (scale, causal, *written)
    decode = _dense_mla_decode if out is None else _dense_mla_decode.into
    if isinstance(meta, FlashMLASchedMeta):
        planned = enable_batch_invariant or meta.tile_scheduler_metadata is not None
        config = _config_of(q, causal, (k_cache, None))
        _bind(meta, config, decode, (*dense, None, None, *options), planned)
    if enable_batch_invariant:
        check_plan_tensors(meta, num_splits, q)
        plan = (None, None)
    else:
        plan = (meta, num_splits) if isinstance(meta, torch.Tensor) else _plan_of(meta, *dense[:4])
    found = decode(*dense, *plan, *options)
    return found if out is None else (out, found)


def _check_options(
    k_cache: torch.Tensor,
    extra_k_cache: torch.Tensor | None,
    indices: torch.Tensor | None,
    plan: tuple[Plan, torch.Tensor | None],
    causal: bool,
    is_fp8_kvcache: bool,
    enable_batch_invariant: bool,
) -> None:
    check_flag("causal", causal)
    check_flag("enable_batch_invariant", enable_batch_invariant)
    if causal and indices is not None:
        raise ValueError("causal: must be False with indices, got True")
    check_layout_flag("k_cache", k_cache, is_fp8_kvcache)
    if indices is not None and extra_k_cache is not None:
        check_layout_flag("extra_k_cache", extra_k_cache, is_fp8_kvcache)
    check_plan(*plan)


def _scale_of(q: torch.Tensor, softmax_scale: float | None) -> float:
    if softmax_scale is not None:
        return softmax_scale
    shape = shape_of(q)
    return shape[-1] ** -0.5 if shape and shape[-1] else 1.0


def _config_of(
    q: torch.Tensor, causal: bool, *selections: tuple[torch.Tensor | None, torch.Tensor | None]
) -> dict[str, object]:
    """Return what a plan stores of a call: `causal`, the shape of q, and parts of the shapes of the pairs (cache,
    indices). The tensors need not be checked yet. Equal calls share one dict, so it must not be changed."""
    shapes = tuple((shape_of(cache), shape_of(indices)) for cache, indices in selections)
    config = _config if torch.compiler.is_compiling() else _known_config  # Dynamo warns about lru_cache
    return config(shape_of(q), causal, shapes)


def _config(
    q: tuple[int, ...], causal: bool, selections: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
) -> dict[str, object]:
    """The result of `_config_of`, from shapes. The shape () stands for an argument that is not a tensor."""
    config = {"q": q, "k_cache": selections[0][0][1:], "causal": causal}
    sparse = [(cache, indices) for cache, indices in selections if cache and indices]
    if sparse:
        config["selections"] = [(*cache[1:2], *indices[2:]) for cache, indices in sparse]
    return config


_known_config = functools.lru_cache(256)(_config)


def _bind(
    meta: FlashMLASchedMeta, config: dict[str, object], decode: Op, arguments: tuple[Any, ...], planned: bool
) -> None:
    """Bind the plan to the call's shapes. Arguments are checked first, so that a call with wrong arguments does not
    change the plan. planned: False if the call will still compute a new plan"""
    if planned and meta.config == config:
        return
    other = meta.have_initialized and meta.config != config
    (decode.arguments if other else decode).check(*arguments)
    bind_plan(meta, config)


def _plan_of(
    meta: FlashMLASchedMeta | None,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the plan in meta, or a new plan, which is stored in meta. A plan from another graph capture is not used.
    (None, None): a size is 0, or decoding will refuse the tensors."""
    if meta is not None and meta.tile_scheduler_metadata is not None:
        if meta.capture is None or meta.capture == capture_number(q):
            return meta.tile_scheduler_metadata, meta.num_splits
    queries, keys, table = (shape_of(x) for x in (q, k_cache, block_table))
    if tuple(map(len, (queries, keys, table))) != (4, 4, 2) or q.dtype not in DTYPES:
        return None, None
    rows, kv_heads = queries[1] * queries[2], keys[2]
    if 0 in (*queries[:3], keys[0], kv_heads, table[1]) or rows % kv_heads:
        return None, None
    plan = _mla_metadata(cache_seqlens, rows // kv_heads, kv_heads, min(table[1] * keys[1], 2**31 - TILE_N))
    if meta is not None:
        meta.tile_scheduler_metadata, meta.num_splits = plan
        meta.capture = capture_number(q)
    return plan


def capture_number(x: torch.Tensor) -> int | None:
    """Return the CUDA runtime's ID of the current stream's capture, if it is being captured."""
    if not x.is_cuda or not torch.cuda.is_current_stream_capturing():
        return None
    from cuda.bindings import runtime  # installed as a dependency of the CuTe DSL

    error, _, number, *_ = runtime.cudaStreamGetCaptureInfo(torch.cuda.current_stream().cuda_stream)
    if error != runtime.cudaError_t.cudaSuccess:
        raise RuntimeError(f"CUDA does not tell which graph is captured: {error.name}")
    return int(number)


def _parts(cache_seqlens: torch.Tensor, rows: int, kv_heads: int, most_keys: int) -> tuple[int, int]:
    """Return (parts, fixed cost per sequence in tiles) of a plan. rows: s_q * h_q / h_k. most_keys: upper bound of the
    keys of a sequence; 0: unknown."""
    parts = max(1, backends.num_sms(cache_seqlens.device) // (kv_heads * -(-rows // TILE_M)))
    tiles = len(cache_seqlens) * -(-most_keys // TILE_N)
    if tiles == 0:
        return parts, OVERHEAD
    if tiles > SHORT * parts:
        each, batch = -(-most_keys // TILE_N) + OVERHEAD, len(cache_seqlens)
        # Left: tiles of the longest part without splits. Right: upper bound of the tiles of a part with splits.
        whole = -(-batch // parts) * each <= -(-batch * each // parts) + OVERHEAD
        return parts, OVERHEAD if whole else OVERHEAD_OF_LONG
    if tiles > HALVED * parts:
        return parts, OVERHEAD
    return max(1, min(tiles, parts // 2)), OVERHEAD_OF_SHORT


def _plan_results(
    cache_seqlens: torch.Tensor, num_q_tokens_per_head_k: int, num_heads_k: int, most_keys: int
) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = num_q_tokens_per_head_k, num_heads_k, most_keys
    parts = _parts(cache_seqlens, *sizes)[0] if _mla_metadata.runs_kernel(cache_seqlens) else 1
    return cache_seqlens.new_empty(parts, PLAN_COLUMNS), cache_seqlens.new_empty(cache_seqlens.shape[0] + 1)


@op(
    arguments=MLA_METADATA,
    reference=plan_one_part,
    results=_plan_results,
    limits={"B": at_most(MAX_BATCH)},
    public="get_mla_metadata",
)
def _mla_metadata(
    cache_seqlens: torch.Tensor,
    num_q_tokens_per_head_k: int,
    num_heads_k: int,
    most_keys: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    from dsa.kernels.mla.mla_plan_sm90 import compile_mla_plan

    parts, overhead = _parts(cache_seqlens, num_q_tokens_per_head_k, num_heads_k, most_keys)
    plan = cache_seqlens.new_empty(parts, PLAN_COLUMNS)
    num_splits = cache_seqlens.new_empty(len(cache_seqlens) + 1)
    if len(cache_seqlens) == 0:
        plan.fill_(-1)[:, PLAN_NUMBERS:].zero_()
        return plan, num_splits.zero_()
    compile_mla_plan()(cache_seqlens, plan, num_splits, overhead)
    return plan, num_splits
