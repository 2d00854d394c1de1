"""Sliding-window attention: to packed keys, to packed keys and selected keys in one softmax, and to a cache."""

import torch

from dsa.kernels.mla.limits import HEAD_DIM_V, MAX_WINDOW, SPARSE_HEAD_DIMS
from dsa.ops.cache._specs import COUNTED_SLOTS, page_layout
from dsa.ops.mla import _sparse_decode
from dsa.ops.mla import window_indices as window_lists
from dsa.ops.mla._latent_caches import check_latent_cache, check_layout_flag, latent_cache
from dsa.ops.mla._sparse_attention import DTYPES, Results, attend, inner_contiguous
from dsa.ops.mla._window_selections import PACKED, SOFTMAX, WINDOW_LIST, Packed, Selected, window_selections
from dsa.reference.mla import sliding_window_attention as reference
from dsa.reference.mla import sliding_window_decode as window_decode
from dsa.runtime.declare import F32, FLOATS, INT32, POSITIVE, ROWS, Arguments, Flag, Int, Number, Tensor, at_most, op

__all__ = ["sliding_window_attention", "sliding_window_decode", "window_sparse_attention"]

LIMITS = {"d": SPARSE_HEAD_DIMS, "d_v": (HEAD_DIM_V,), "softmax_scale": POSITIVE}
SLIDING_WINDOW_ATTENTION = Arguments(**PACKED, **SOFTMAX, indices=WINDOW_LIST)
WINDOW_SPARSE_ATTENTION = Arguments(
    **PACKED,
    compressed=Tensor("n 1 d", FLOATS, like="q", layout=ROWS),
    indices=Tensor("total_q K", INT32),
    **SOFTMAX,
    topk_length=Tensor("total_q", INT32, optional=True),
    window_indices=WINDOW_LIST,
)


def _check_cache(
    q: torch.Tensor, cache: torch.Tensor, block_table: torch.Tensor | None, window: int, is_fp8_kvcache: bool
) -> None:
    check_layout_flag("cache", cache, is_fp8_kvcache)
    check_latent_cache("cache", cache, q)
    batch, s_q, *_ = q.shape
    if block_table is None and (cache.shape[0] < batch or cache.shape[1] < window + s_q - 1):
        raise ValueError(
            f"cache: must have a page of at least window + s_q - 1 = {window + s_q - 1} keys for each of {batch} "
            f"sequences without a block_table, got {cache.shape[0]} pages of {cache.shape[1]} (sizes as of q)"
        )


SLIDING_WINDOW_DECODE = Arguments(
    limits=COUNTED_SLOTS,
    rule=_check_cache,
    q=Tensor("B s_q H d", FLOATS),
    cache=latent_cache("pages P 1 row", layout=page_layout),
    block_table=Tensor("B max_pages", INT32, optional=True),
    cache_seqlens=Tensor("B", INT32),
    window=Int(),
    softmax_scale=Number(),
    d_v=Int(most="d"),
    attn_sink=Tensor("H", F32, optional=True),
    is_fp8_kvcache=Flag(),
)


def sliding_window_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    window: int,
    softmax_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    *,
    indices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out[t, h] = sum_j softmax_j(softmax_scale * q[t, h] . k_j) k_j[:d_v] over keys max(0, p - window + 1) <= j <= p.

    p is the query's position, and j the position of key k_j, among the Lk keys of the query's sequence in kv. The Lq
    queries of a sequence have its last positions: query i has p = Lk - Lq + i. A query with p < 0 sees no key.

    q              [total_q, H, d] bf16 or fp16, the sequences one after another; fp32 runs the PyTorch reference, with
                   a warning on Hopper
    kv             [total_k, 1, d] in q's dtype; a value is the first d_v numbers of its key
    cu_seqlens_q   [B + 1] int32, not decreasing: sequence b has the queries cu_seqlens_q[b] up to cu_seqlens_q[b + 1]
    cu_seqlens_k   [B + 1] int32, likewise for the keys
    window         maximum number of keys that a query sees, including its own key; at least 1
    softmax_scale  multiplies the logits: a finite number
    d_v            at most d
    attn_sink      [H] fp32 or None, any value from -inf to +inf: out is scaled by e^lse / (e^lse + e^sink)
    indices        [total_q, window] int32 or None: the result of `window_indices` for these sequences, which is the
                   same for all layers of a forward pass. None: the op calls `window_indices`, which costs a kernel
                   launch

    Returns out [total_q, H, d_v] in q's dtype and lse [total_q, H] fp32 (natural log, without the sink). A query
    without keys, also a query that belongs to no sequence, has out 0 and lse +inf. NaN in kv reaches only the queries
    whose window contains it.
    Raises TypeError or ValueError for other types, dtypes, shapes, strides and devices; the reference also raises for
    decreasing, negative or too large cu_seqlens. The kernel cannot raise for these cu_seqlens: a query of a sequence
    with wrong boundaries attends to unspecified keys of kv, or to none, and nothing outside kv is read.
    On Hopper: d = 576 or 512 with d_v = 512, any number of heads without padding (multiples of 64 fill the tensor
    cores), any strides of q, rows of kv at multiples of 16 bytes, softmax_scale above 0. Logits and sums are fp32;
    softmax weights are rounded to q's dtype before the values are multiplied by them. Two kernels run: that of
    `window_indices`, unless `indices` is given, and that of `flash_mla_sparse_fwd`. The second kernel gathers keys in
    tiles of 64, so a window costs as much as its size rounded up to a multiple of 64. Deterministic, and a query's
    result does not depend on the other queries, bit for bit. CUDA-graph safe with new cu_seqlens, no host
    synchronisation. The workspace is the result of `window_indices`, at most 4 * total_q * window bytes, unless
    `indices` is given. No gradients on Hopper, even if q or kv requires them.
    Source: DeepSeek-V4 (arXiv 2606.19348), the window branch.
    """
    softmax = (softmax_scale, d_v, attn_sink)
    return _sliding_window_attention(q, kv, cu_seqlens_q, cu_seqlens_k, window, *softmax, indices)


def window_sparse_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    window: int,
    compressed: torch.Tensor,
    indices: torch.Tensor,
    softmax_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    *,
    window_indices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out[t, h] = sum_j softmax_j(softmax_scale * q[t, h] . k_j) k_j[:d_v] over the keys of a window and selected
    entries.

    The keys of query t's window are the rows of kv that `sliding_window_attention` attends to. The selected entries are
    the rows indices[t] of compressed. There is one softmax over all of them, and one sink. This is the attention of
    V4's layers in prefill. In decoding, call `flash_mla_with_kvcache` with the result of `window_slots` as indices, and
    the entries as extra_k_cache with extra_indices_in_kvcache.

    q             [total_q, H, d] bf16 or fp16, the sequences one after another; fp32 runs the PyTorch reference, with a
                  warning on Hopper
    kv            [total_k, 1, d] in q's dtype; a value is the first d_v numbers of its key
    cu_seqlens_q, cu_seqlens_k  [B + 1] int32, not decreasing: where the sequences begin in q and in kv
    window        maximum number of keys of kv that a query sees, including its own key; at least 1
    compressed    [n, 1, d] in q's dtype, keys of any origin; a value is the first d_v numbers of its key
    indices       [total_q, K] int32, rows of compressed; indices outside [0, n) are ignored. A key that is selected
                  twice counts twice
    softmax_scale multiplies the logits: a finite number
    d_v           at most d
    attn_sink     [H] fp32 or None, any value from -inf to +inf: out is scaled by e^lse / (e^lse + e^sink)
    topk_length   [total_q] int32 or None: only the first topk_length[t] indices of query t count
    window_indices  [total_q, window] int32 or None: the result of `dsa.window_indices`, which is the same for all
                  layers of a forward pass. None: the op calls that function, which costs a kernel launch

    Returns out [total_q, H, d_v] in q's dtype and lse [total_q, H] fp32 (natural log, without the sink). A query
    without keys has out 0 and lse +inf. NaN in a key reaches only the queries that attend to it.
    Raises the errors of `sliding_window_attention`. On Hopper it accepts the same shapes, with any K and n, and has no
    gradients.
    Source: DeepSeek-V4 (arXiv 2606.19348), one softmax over window and compressed keys.
    """
    packed = (q, kv, cu_seqlens_q, cu_seqlens_k, window)
    softmax = (softmax_scale, d_v, attn_sink)
    return _window_sparse_attention(*packed, compressed, indices, *softmax, topk_length, window_indices)


def sliding_window_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor,
    window: int,
    softmax_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    is_fp8_kvcache: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out[b, i, h] = sum_j softmax_j(softmax_scale * q[b, i, h] . k_j) k_j[:d_v], max(0, p - window + 1) <= j <= p.

    k_j is key j of sequence b. p = cache_seqlens[b] - s_q + i, because the queries have the last positions of the
    cached keys. A query with p < 0 sees no key.

    q              [B, s_q, H, d] bf16 or fp16; fp32 runs the PyTorch reference, with a warning on Hopper
    cache          [pages, P, 1, d] in q's dtype, or with is_fp8_kvcache [pages, P, 1, 656 | 584] bytes as
                   `write_kv_cache` lays them out (d = 576 or 512); a value is the first d_v numbers of its key. At most
                   2^31 slots (pages * P)
    block_table    [B, max_pages] int32: key s is at offset s % P of page block_table[b, s // P]. None: page b is a ring
                   of sequence b's keys, and key s is at offset s % P of the page
    cache_seqlens  [B] int32, keys per sequence, including the keys of the queries' tokens; may be 0
    window         maximum number of keys that a query sees, including its own key; at least 1. A ring has P >= window +
                   s_q - 1; with a block_table, a window above max_pages * P counts as max_pages * P
    softmax_scale  multiplies the logits: a finite number
    d_v            at most d
    attn_sink      [H] fp32 or None, any value from -inf to +inf: out is scaled by e^lse / (e^lse + e^sink)

    Returns out [B, s_q, H, d_v] in q's dtype, contiguous, and lse [B, H, s_q] fp32 (natural log, without the sink), a
    view of [B, s_q, H]. A query without keys has out 0 and lse +inf; a page outside the table or the cache counts as
    one without keys and is not read. NaN in a cached row reaches only the queries whose window contains it.
    Raises TypeError or ValueError for other types, dtypes, shapes, strides, devices and combinations.
    On Hopper: d = 576 or 512 with d_v = 512, any number of heads, softmax_scale above 0; B * s_q, P and the window up
    to 2^30; a byte cache needs bf16 q. Two kernels run: that of `window_slots`, and then that of
    `flash_mla_with_kvcache` with the resulting indices. The indices are the same for all layers of a forward pass, so a
    caller with many layers should make them once and call `flash_mla_with_kvcache` in place of this op. Deterministic;
    with windows of up to 256 keys a sequence's result does not depend on the other sequences, bit for bit. With longer
    windows the rounding of a result depends on the other sequences. CUDA-graph safe with new tables and lengths, no
    host synchronisation. No gradients on Hopper, even if q or the cache requires them.
    Source: DeepSeek-V4 (arXiv 2606.19348), the window branch.
    """
    options = (softmax_scale, d_v, attn_sink, is_fp8_kvcache)
    return _sliding_window_decode(q, cache, block_table, cache_seqlens, window, *options)


def _allocate(q: torch.Tensor, d_v: int) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(*q.shape[:2], d_v), q.new_empty(q.shape[:2], dtype=torch.float32)


@op(
    arguments=SLIDING_WINDOW_ATTENTION,
    reference=reference.sliding_window_attention,
    results=_allocate,
    limits=LIMITS,
    dtypes=DTYPES,
)
def _sliding_window_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    window: int,
    softmax_scale: float,
    d_v: int,
    attn_sink: torch.Tensor | None,
    indices: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    packed = (q, kv, cu_seqlens_q, cu_seqlens_k, window)
    return _attend(packed, indices, None, softmax_scale, d_v, attn_sink)


@op(
    arguments=WINDOW_SPARSE_ATTENTION,
    reference=reference.window_sparse_attention,
    results=_allocate,
    limits=LIMITS,
    dtypes=DTYPES,
)
def _window_sparse_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    window: int,
    compressed: torch.Tensor,
    indices: torch.Tensor,
    softmax_scale: float,
    d_v: int,
    attn_sink: torch.Tensor | None,
    topk_length: torch.Tensor | None,
    window_indices: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    packed = (q, kv, cu_seqlens_q, cu_seqlens_k, window)
    selected = (compressed, indices, topk_length)
    return _attend(packed, window_indices, selected, softmax_scale, d_v, attn_sink)


def _check_decode(q: torch.Tensor, cache: torch.Tensor, block_table: torch.Tensor | None, window: int) -> None:
    _sparse_decode.check_cache("cache", cache, q)
    columns = window_decode.columns_of(window, block_table, cache)
    if columns > MAX_WINDOW:
        raise ValueError(f"window: the kernel takes at most {MAX_WINDOW} keys, got {columns}")


@op(
    arguments=SLIDING_WINDOW_DECODE,
    reference=window_decode.sliding_window_decode,
    results=lambda q, d_v: _sparse_decode.allocate(q, d_v),
    limits=LIMITS | {"B*s_q": at_most(MAX_WINDOW), "P": at_most(MAX_WINDOW)},
    rule=_check_decode,
    dtypes=DTYPES,
)
def _sliding_window_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor,
    window: int,
    softmax_scale: float,
    d_v: int,
    attn_sink: torch.Tensor | None,
    is_fp8_kvcache: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    columns = window_decode.columns_of(window, block_table, cache)
    lists = (block_table, cache_seqlens, q.shape[1], cache.shape[1], columns)
    slots = window_lists._window_slots.launch_on(q.device, *lists)
    options = None, None, None, None, d_v, softmax_scale, attn_sink, False
    return _sparse_decode._sparse_mla_decode.launch_on(q.device, q, cache, slots, *options)


def _attend(
    packed: Packed,
    near: torch.Tensor | None,
    selected: Selected | None,
    scale: float,
    d_v: int,
    attn_sink: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) for checked arguments. near: the result of `window_indices`, or None."""
    q = packed[0]
    out, lse = _allocate(q, d_v)
    if 0 in q.shape[:2]:
        return out, lse
    selections = window_selections(packed, near, selected)
    if not selections:
        return out.zero_(), lse.fill_(torch.inf)
    sink = None if attn_sink is None else inner_contiguous(attn_sink)
    attend(q, selections, scale, sink, Results(out.unsqueeze(1), lse.unsqueeze(2), None), may_split=False)
    return out, lse
