"""Attention to the last keys of each sequence: of packed keys, also joined with selected ones, and of a cache."""

import math

import torch

from dsa import backends
from dsa.kernels.mla.limits import HEAD_DIM_V, SPARSE_HEAD_DIMS
from dsa.ops._aligned import rows_at_16_bytes
from dsa.ops._kernel_arguments import dtype_name
from dsa.ops.known_calls import KnownCalls, signature
from dsa.ops.mla import _sparse_decode

# The module: by name, its ops would count as this one's.
from dsa.ops.mla import window_indices as window_lists
from dsa.ops.mla._sparse_attention import Results, Selection, attend, inner_contiguous
from dsa.reference.checks import check_same_dtype
from dsa.reference.mla import sliding_window_attention as reference
from dsa.reference.mla import sliding_window_decode as window_decode

__all__ = ["sliding_window_attention", "sliding_window_decode", "window_sparse_attention"]


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
    """out[t] = softmax_j(softmax_scale * q[t] . kv[j]) kv[j, :d_v] over the keys max(0, p - window + 1) <= j <= p.

    p is the query's position among its sequence's keys: queries are the last of them, so that query i of Lq has
    p = Lk - Lq + i. A query with p < 0 sees no key.

    q              [total_q, H, d] bf16 or fp16, the sequences one after another; fp32 runs the PyTorch reference, with
                   a warning on Hopper
    kv             [total_k, 1, d] in q's dtype; a value is the first d_v numbers of its key
    cu_seqlens_q   [B + 1] int32, not decreasing: sequence b has the queries cu_seqlens_q[b] up to cu_seqlens_q[b + 1]
    cu_seqlens_k   [B + 1] int32, likewise for the keys
    window         keys that a query sees at most, itself included; at least 1
    softmax_scale  multiplies the logits: a finite number
    d_v            at most d
    attn_sink      [H] fp32 or None, any value from -inf to +inf: out is scaled by e^lse / (e^lse + e^sink)
    indices        [total_q, window] int32 or None: what `window_indices` gives for this, which is the same for all
                   layers of a pass. None: made here, by a kernel more

    Returns out [total_q, H, d_v] in q's dtype and lse [total_q, H] fp32 (natural log, without the sink). A query
    without keys, also one that belongs to no sequence, has out 0 and lse +inf. NaN in kv reaches only the queries whose
    window holds it.
    Raises TypeError or ValueError for other types, dtypes, shapes, strides and devices; and where the reference runs,
    for decreasing, negative or too large cu_seqlens. The kernel does not see these in time: a query of such a sequence
    attends to unspecified keys of kv, or to none, and nothing outside kv is read.
    On Hopper: d = 576 or 512 with d_v = 512, any number of heads without padding (multiples of 64 fill the tensor
    cores), any strides of q, rows of kv at multiples of 16 bytes, softmax_scale above 0. Logits and sums are fp32;
    softmax weights are rounded to q's dtype before they meet the values. Two kernels, `window_indices`' and
    `flash_mla_sparse_fwd`'s: keys are gathered in tiles of 64, and a window fills its last one or not. Deterministic,
    and a query's result does not depend on the others, bit for bit. CUDA-graph safe with new cu_seqlens, no host
    synchronisation. Workspace: the list, 4 bytes a query and key.
    Source: DeepSeek-V4 (arXiv 2606.19348), the window branch.
    """
    if isinstance(q, torch.Tensor) and q.dtype == torch.float32:
        backends.note_reference_only("sliding_window_attention in float32", q)
    arguments = (q, kv, cu_seqlens_q, cu_seqlens_k, window, softmax_scale, d_v, attn_sink, indices)
    return (torch.ops.dsa.sliding_window_attention if torch.compiler.is_compiling() else _window)(*arguments)


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
    """out[t] = softmax_j(softmax_scale * q[t] . k_j) k_j[:d_v] over the keys of t's window and its selected entries.

    The window's keys are those rows of kv that `sliding_window_attention` attends to, the others the rows indices[t] of
    compressed. One softmax over all of them, and one sink: V4's layer in prefill. In decoding the same is
    `flash_mla_with_kvcache` with indices = `window_slots`, extra_k_cache and extra_indices_in_kvcache.

    q             [total_q, H, d] bf16 or fp16, the sequences one after another; fp32 runs the PyTorch reference, with a
                  warning on Hopper
    kv            [total_k, 1, d] in q's dtype; a value is the first d_v numbers of its key
    cu_seqlens_q, cu_seqlens_k  [B + 1] int32, not decreasing: where the sequences begin in q and in kv
    window        keys of kv that a query sees at most, itself included; at least 1
    compressed    [n, 1, d] in q's dtype, keys of any origin; a value is the first d_v numbers of its key
    indices       [total_q, K] int32, rows of compressed; negative or at least n is no key. A key named twice counts
                  twice
    softmax_scale multiplies the logits: a finite number
    d_v           at most d
    attn_sink     [H] fp32 or None, any value from -inf to +inf: out is scaled by e^lse / (e^lse + e^sink)
    topk_length   [total_q] int32 or None: only the first topk_length[t] of indices[t] count
    window_indices  [total_q, window] int32 or None: what the function of this name gives, which is the same for all
                  layers of a pass. None: made here, by a kernel more

    Returns out [total_q, H, d_v] in q's dtype and lse [total_q, H] fp32 (natural log, without the sink). A query
    without keys has out 0 and lse +inf. NaN reaches only the queries that attend to it.
    Raises as `sliding_window_attention` does, and on Hopper takes what that takes, with any K and n.
    Source: DeepSeek-V4 (arXiv 2606.19348), one softmax over window and compressed keys.
    """
    if isinstance(q, torch.Tensor) and q.dtype == torch.float32:
        backends.note_reference_only("window_sparse_attention in float32", q)
    packed = (q, kv, cu_seqlens_q, cu_seqlens_k, window)
    selected = (compressed, indices, softmax_scale, d_v, attn_sink, topk_length)
    op = torch.ops.dsa.window_sparse_attention if torch.compiler.is_compiling() else _window_sparse
    return op(*packed, *selected, window_indices)


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
    """out[b, i] = softmax_j(softmax_scale * q[b, i] . k_j) k_j[:d_v] over the keys max(0, p - window + 1) <= j <= p.

    p = cache_seqlens[b] - s_q + i: the queries are the last of the cached keys. With p < 0 a query sees no key.

    q              [B, s_q, H, d] bf16 or fp16; fp32 runs the PyTorch reference, with a warning on Hopper
    cache          [pages, P, 1, d] in q's dtype, or with is_fp8_kvcache [pages, P, 1, 656 | 584] bytes as
                   `write_kv_cache` lays them out (d = 576 or 512); a value is the first d_v numbers of its key. At most
                   2^31 keys
    block_table    [B, max_pages] int32: key s is at offset s % P of page block_table[b, s // P]. None, a ring: it is at
                   offset s % P of page b
    cache_seqlens  [B] int32, keys per sequence, the queries' own included; 0 is legal
    window         keys that a query sees at most, itself included; at least 1. A ring has P >= window + s_q - 1; with a
                   block_table, a window above max_pages * P counts as that
    softmax_scale  multiplies the logits: a finite number
    d_v            at most d
    attn_sink      [H] fp32 or None, any value from -inf to +inf: out is scaled by e^lse / (e^lse + e^sink)

    Returns out [B, s_q, H, d_v] in q's dtype, contiguous, and lse [B, H, s_q] fp32 (natural log, without the sink). A
    query without keys has out 0 and lse +inf; a page outside the table or the cache holds no keys and is not read. NaN
    in a cached row reaches only the queries whose window holds it.
    Raises TypeError or ValueError for other types, dtypes, shapes, strides, devices and combinations.
    On Hopper: `window_slots`, which is the same for all layers of a pass, and then `flash_mla_with_kvcache` with these
    indices; a caller that has them calls that. What it takes, this takes: d = 576 or 512 with d_v = 512, any number of
    heads and queries, pages of any size, softmax_scale above 0, with bytes bf16 q. Deterministic; with windows of up to
    192 keys a sequence's result does not depend on the others, bit for bit, and with longer ones by rounding.
    CUDA-graph safe with new tables and lengths, no host synchronisation.
    Source: DeepSeek-V4 (arXiv 2606.19348), the window branch.
    """
    arguments = (q, cache, block_table, cache_seqlens, window, softmax_scale, d_v, attn_sink, is_fp8_kvcache)
    if not isinstance(q, torch.Tensor) or q.dtype == torch.float32:
        if isinstance(q, torch.Tensor):
            window_decode.check_window_decode(*arguments)
            if not is_fp8_kvcache:
                check_same_dtype(("q", q), cache=cache)
            backends.note_reference_only("sliding_window_decode in float32", q)
        return window_decode.sliding_window_decode(*arguments)
    compiling = torch.compiler.is_compiling()
    call = None if compiling else signature(backends.runs_kernel("sliding_window_decode", q), *arguments)
    if call is None or call not in _known_calls:
        window_decode.check_window_decode(*arguments)
        if call is not None:
            if backends.runs_kernel("sliding_window_decode", q):
                _check_decode(q, cache, softmax_scale, d_v)
            _known_calls.remember(call, {})
    window = window_decode.columns_of(window, block_table, cache)
    slots = window_lists.window_slots(block_table, cache_seqlens, q.shape[1], cache.shape[1], window)
    decode = torch.ops.dsa.sparse_mla_decode if compiling else _sparse_decode.decode
    return decode(q, cache, slots, None, None, None, None, d_v, softmax_scale, attn_sink, False)


_known_calls = KnownCalls()


def _window(
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
    packed, options = (q, kv, cu_seqlens_q, cu_seqlens_k, window), (softmax_scale, d_v, attn_sink)
    reference.check_window_attention(*packed, *options, indices)
    check_same_dtype(("q", q), kv=kv)
    if q.dtype == torch.float32 or not backends.runs_kernel("sliding_window_attention", q):
        return reference.sliding_window_attention(*packed, *options, indices=indices)
    _check_kernel_takes(q, {"kv": kv}, *options[:2])
    return _attend(packed, indices, None, *options)


def _window_sparse(
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
    packed, options = (q, kv, cu_seqlens_q, cu_seqlens_k, window), (softmax_scale, d_v, attn_sink)
    selected = (compressed, indices, topk_length)
    reference.check_window_attention(*packed, *options, window_indices, "window_indices")
    reference.check_selected(q, *selected)
    check_same_dtype(("q", q), kv=kv, compressed=compressed)
    if q.dtype == torch.float32 or not backends.runs_kernel("window_sparse_attention", q):
        return reference.window_sparse_attention(
            *packed, compressed, indices, *options, topk_length, window_indices=window_indices
        )
    _check_kernel_takes(q, {"kv": kv, "compressed": compressed}, *options[:2])
    return _attend(packed, window_indices, selected, *options)


def _attend(
    packed: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int],
    near: torch.Tensor | None,
    selected: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None,
    scale: float,
    d_v: int,
    attn_sink: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of checked arguments. near: the window's keys, if the caller has them."""
    q, kv, cu_seqlens_q, cu_seqlens_k, window = packed
    out, lse = _allocate(q, d_v)
    if 0 in q.shape[:2]:
        return out, lse
    lists = []
    if kv.shape[0]:
        if near is None:
            near = window_lists.window_indices(cu_seqlens_q, cu_seqlens_k, q.shape[0], min(window, kv.shape[0]))
        lists.append(Selection(_one_page(kv), inner_contiguous(near), None))
    if selected is not None and selected[0].shape[0] and selected[1].shape[1]:
        keys, indices, counts = selected
        counts = None if counts is None else inner_contiguous(counts)
        lists.append(Selection(_one_page(keys), inner_contiguous(indices), counts))
    if not lists:
        return out.zero_(), lse.fill_(torch.inf)
    sink = None if attn_sink is None else inner_contiguous(attn_sink)
    attend(q, lists, scale, sink, Results(out.unsqueeze(1), lse.unsqueeze(2), None), may_split=False)
    return out, lse


def _one_page(keys: torch.Tensor) -> torch.Tensor:
    return rows_at_16_bytes(keys.squeeze(1).unsqueeze(0))


def _allocate(q: torch.Tensor, d_v: int) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(*q.shape[:2], d_v), q.new_empty(q.shape[:2], dtype=torch.float32)


def _check_kernel_takes(
    q: torch.Tensor,
    keys: dict[str, torch.Tensor],
    softmax_scale: float,
    d_v: int,
) -> None:
    if q.shape[-1] not in SPARSE_HEAD_DIMS:
        raise ValueError(
            f"q: the Hopper kernel takes d = {SPARSE_HEAD_DIMS[0]} or {SPARSE_HEAD_DIMS[1]}, got shape {list(q.shape)}"
        )
    if d_v != HEAD_DIM_V:
        raise ValueError(f"d_v: the Hopper kernel takes {HEAD_DIM_V}, got {d_v}")
    if not 0 < softmax_scale < math.inf:
        raise ValueError(f"softmax_scale: the Hopper kernel takes a positive number, got {softmax_scale}")
    for name, x in keys.items():
        if x.numel() and rows_at_16_bytes(x) is None:
            raise ValueError(
                f"{name}: channels must be contiguous and keys start at multiples of 16 bytes, got strides "
                f"{list(x.stride())} and an address {x.data_ptr() % 16} bytes past one"
            )


def _check_decode(q: torch.Tensor, cache: torch.Tensor, softmax_scale: float, d_v: int) -> None:
    if cache.is_floating_point() and cache.element_size() > 1:
        _check_kernel_takes(q, {"cache": cache}, softmax_scale, d_v)
        return
    _check_kernel_takes(q, {}, softmax_scale, d_v)
    if q.dtype != torch.bfloat16:
        raise ValueError(f"q: the Hopper kernel takes bfloat16 with a byte cache, got {dtype_name(q.dtype)}")
    _sparse_decode._check_bytes("cache", cache)


torch.library.custom_op("dsa::sliding_window_attention", mutates_args=())(_window)
torch.library.custom_op("dsa::window_sparse_attention", mutates_args=())(_window_sparse)


@torch.library.register_fake("dsa::sliding_window_attention")
def _(
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
    reference.check_window_attention(*packed, softmax_scale, d_v, attn_sink, indices)
    return _allocate(q, d_v)


@torch.library.register_fake("dsa::window_sparse_attention")
def _(
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
    reference.check_window_attention(*packed, softmax_scale, d_v, attn_sink, window_indices, "window_indices")
    reference.check_selected(q, compressed, indices, topk_length)
    return _allocate(q, d_v)
