"""MLA decoding over a paged latent cache: dense, or over the keys that an indexer selected."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.cache.kv_cache import BYTE_DTYPES, cache_dim, read_kv_cache
from dsa.reference.checks import FLOATS, INT32, check_flag, check_memory, check_number, check_same_device, check_tensor
from dsa.reference.mla.mla_metadata import FlashMLASchedMeta, check_plan, remember_config
from dsa.reference.mla.softmax_attention import apply_sink, attend, check_keys_dtype, check_value_dim

# Numbers in the largest gathered [queries, K, d] tensor: 256 MiB of fp32.
_CHUNK = 2**26


@without_autocast
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

    q              [B, s_q, h_q, d] fp32, bf16 or fp16; if fp32, keys may be of any of these
    k_cache        [pages, P, h_k, d] in q's dtype, or with is_fp8_kvcache [pages, P, 1, 656 | 584] bytes as
                   `kv_cache` lays them out (d = 576 or 512). h_k divides h_q; query head h reads key head
                   h // (h_q / h_k). A value is the first head_dim_v numbers of its key
    head_dim_v     at most d
    tile_scheduler_metadata, num_splits  from `get_mla_metadata` in either style, or None. The result does not depend on
                   the plan; a FlashMLASchedMeta may be used again with the same shapes only
    softmax_scale  multiplies the logits: a finite number, or None: d^-0.5
    batch_invariant  changes nothing here: no result depends on another sequence

    Dense, if indices is None:
    block_table    [B, max_pages] int32: key s is at offset s % P of page block_table[b, s // P]. Entries past the
                   sequence are never looked at; a page outside the cache holds no keys
    cache_seqlens  [B] int32, keys per sequence
    causal         True: query i sees the first cache_seqlens - s_q + i + 1 keys. False: it sees all of them

    Sparse (h_k = 1, causal False; block_table and cache_seqlens are not used):
    indices        [B, s_q, K] int32, page * P + offset; negative or outside the cache is no key. A key named twice
                   counts twice
    topk_length    [B] int32 or None: only the first topk_length[b] indices count
    attn_sink      [h_q] fp32 or None, any value from -inf to +inf: out is scaled by e^lse / (e^lse + e^sink)
    extra_k_cache, extra_indices_in_kvcache [B, s_q, K2], extra_topk_length [B]  a second cache, of its own layout and
                   page size, whose selected keys join the same softmax

    Returns out [B, s_q, h_q, head_dim_v] in q's dtype and lse [B, h_q, s_q] fp32 (natural log, without the sink). A
    query without keys has out 0 and lse +inf. NaN in a cached row reaches only the queries that select it. Everything
    is fp32 in between, with the FP8 scales in full precision.
    Raises TypeError or ValueError for other types, dtypes, shapes, strides and combinations.
    Source: FlashMLA's function of this name, which takes fewer caches, head counts and combinations.
    """
    if indices is None:
        unused = {
            **{"attn_sink": attn_sink, "topk_length": topk_length, "extra_k_cache": extra_k_cache},
            **{"extra_indices_in_kvcache": extra_indices_in_kvcache, "extra_topk_length": extra_topk_length},
        }
        plan, options = (tile_scheduler_metadata, num_splits), (causal, is_fp8_kvcache, softmax_scale, batch_invariant)
        config = check_dense(q, k_cache, block_table, cache_seqlens, head_dim_v, *plan, *options, unused)
        remember_config(tile_scheduler_metadata, config)
        scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
        out, lse = decode_dense(q, k_cache, block_table, cache_seqlens, head_dim_v, scale, causal)
        return out.to(q.dtype), lse

    selections = [(k_cache, indices, topk_length), (extra_k_cache, extra_indices_in_kvcache, extra_topk_length)]
    plan, options = (tile_scheduler_metadata, num_splits), (causal, is_fp8_kvcache, softmax_scale, batch_invariant)
    config = check_sparse(q, *selections, head_dim_v, *plan, *options, attn_sink)
    remember_config(tile_scheduler_metadata, config)
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    out, lse = decode_sparse(q, *selections, head_dim_v, scale, attn_sink)
    return out.to(q.dtype), lse


def check_dense(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta | torch.Tensor | None,
    num_splits: torch.Tensor | None,
    causal: bool,
    is_fp8_kvcache: bool,
    softmax_scale: float | None,
    batch_invariant: bool,
    unused: dict[str, torch.Tensor | None],
) -> dict:
    """What dense decoding asks of its arguments. Returns what a plan is to remember of them."""
    _check_options(causal, is_fp8_kvcache, softmax_scale, batch_invariant)
    _check_queries(q, k_cache, head_dim_v, is_fp8_kvcache)
    _check_unused(unused, "indices")
    batch, _, h_q, _ = q.shape
    check_tensor("block_table", block_table, INT32, (batch, "max_pages"), "q")
    check_tensor("cache_seqlens", cache_seqlens, INT32, (batch,), "q")
    if k_cache.shape[2] == 0 or h_q % k_cache.shape[2]:
        raise ValueError(f"k_cache: its h_k heads must divide q's h_q = {h_q}, got h_k = {k_cache.shape[2]}")
    check_same_device(("q", q), k_cache=k_cache, block_table=block_table, cache_seqlens=cache_seqlens)
    shapes = {"q": tuple(q.shape), "k_cache": tuple(k_cache.shape[1:]), "causal": causal}
    check_plan(tile_scheduler_metadata, num_splits, q, shapes)
    return shapes


@without_autocast
def decode_dense(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    d_v: int,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense decoding, its arguments checked: out [B, s_q, h_q, d_v] and lse [B, h_q, s_q] fp32."""
    check_memory("q", q)
    batch, s_q, h_q, _ = q.shape
    pages, page_size, h_k, _ = k_cache.shape
    group = h_q // h_k
    out = torch.zeros(batch, s_q, h_q, d_v, dtype=torch.float32, device=q.device)
    lse = torch.full((batch, h_q, s_q), torch.inf, dtype=torch.float32, device=q.device)
    for b in range(batch):
        length = min(max(int(cache_seqlens[b]), 0), block_table.shape[1] * page_size)
        position = torch.arange(length, device=q.device)
        page = block_table[b, position // page_size].long()
        slots = torch.where((page >= 0) & (page < pages), page * page_size + position % page_size, -1)
        for head in range(h_k):
            heads = slice(head * group, (head + 1) * group)
            kv = read_kv_cache(k_cache[:, :, head : head + 1], slots)
            for i in range(s_q):
                # A slice rather than a mask: a key that a query does not see must not touch it, even if it is NaN.
                seen = max(0, int(cache_seqlens[b]) - s_q + i + 1) if causal else length
                row, row_lse, _ = attend(q[b, None, i, heads], kv[None, :seen], slots[None, :seen] >= 0, scale, d_v)
                out[b, i, heads], lse[b, heads, i] = row[0], row_lse[0]
    return out, lse


# A cache [pages, P, 1, d], indices [B, s_q, K] and how many of them count [B], if not all.
Selection = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def check_sparse(
    q: torch.Tensor,
    selection: Selection,
    extra: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta | torch.Tensor | None,
    num_splits: torch.Tensor | None,
    causal: bool,
    is_fp8_kvcache: bool,
    softmax_scale: float | None,
    batch_invariant: bool,
    attn_sink: torch.Tensor | None,
) -> dict:
    """What sparse decoding asks of its arguments. Returns what a plan is to remember of them."""
    _check_options(causal, is_fp8_kvcache, softmax_scale, batch_invariant)
    _check_queries(q, selection[0], head_dim_v, is_fp8_kvcache)
    h_q = q.shape[2]
    if causal:
        raise ValueError("causal: must be False with indices, got True")
    if attn_sink is not None:
        check_tensor("attn_sink", attn_sink, (torch.float32,), (h_q,), "q")
        check_same_device(("q", q), attn_sink=attn_sink)
    _check_selection("", selection, q)
    shapes = {"q": tuple(q.shape), "k_cache": tuple(selection[0].shape[1:]), "causal": causal}
    shapes["selections"] = [(selection[0].shape[1], selection[1].shape[2])]
    if extra[0] is None:
        names = ("extra_indices_in_kvcache", "extra_topk_length")
        _check_unused(dict(zip(names, extra[1:])), "extra_k_cache")
    else:
        _check_cache("extra_k_cache", extra[0], q, is_fp8_kvcache)
        _check_selection("extra_", extra, q)
        shapes["selections"].append((extra[0].shape[1], extra[1].shape[2]))
    check_plan(tile_scheduler_metadata, num_splits, q, shapes)
    return shapes


@without_autocast
def decode_sparse(
    q: torch.Tensor,
    selection: Selection,
    extra: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    d_v: int,
    scale: float,
    attn_sink: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sparse decoding, its arguments checked: out [B, s_q, h_q, d_v] and lse [B, h_q, s_q] fp32."""
    check_memory("q", q)
    selections = [(cache, _slots(cache, *rest)) for cache, *rest in (selection, extra) if cache is not None]
    out, lse = _sparse(q.flatten(0, 1), selections, d_v, scale)
    if attn_sink is not None:
        out = apply_sink(out, lse, attn_sink)
    out, lse = out.unflatten(0, q.shape[:2]), lse.unflatten(0, q.shape[:2])
    return out, lse.transpose(1, 2).contiguous()


def _sparse(
    q: torch.Tensor, selections: list[tuple[torch.Tensor, torch.Tensor]], d_v: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [R, h_q, d] over (cache, slots [R, K]) pairs, -1 for no key: out [R, h_q, d_v] and lse [R, h_q]."""
    rows, h_q, d = q.shape
    out = torch.empty(rows, h_q, d_v, dtype=torch.float32, device=q.device)
    lse = torch.empty(rows, h_q, dtype=torch.float32, device=q.device)
    chunk = max(1, _CHUNK // max(1, d * sum(slots.shape[1] for _, slots in selections)))
    for first in range(0, rows, chunk):
        part = slice(first, first + chunk)
        kv = torch.cat([read_kv_cache(cache, slots[part]) for cache, slots in selections], dim=1)
        valid = torch.cat([slots[part] >= 0 for _, slots in selections], dim=1)
        out[part], lse[part], _ = attend(q[part], kv, valid, scale, d_v)
    return out, lse


def _check_selection(prefix: str, selection: Selection, q: torch.Tensor) -> None:
    cache, indices, topk_length = selection
    if cache.shape[2] != 1:
        raise ValueError(f"{prefix}k_cache: must have h_k = 1 with indices, got shape {list(cache.shape)}")
    name = f"{prefix}indices_in_kvcache" if prefix else "indices"
    check_tensor(name, indices, INT32, (*q.shape[:2], "K"), "q")
    if topk_length is not None:
        check_tensor(f"{prefix}topk_length", topk_length, INT32, (q.shape[0],), "q")
    check_same_device(("q", q), **{f"{prefix}k_cache": cache, name: indices, f"{prefix}topk_length": topk_length})


def _slots(cache: torch.Tensor, indices: torch.Tensor, topk_length: torch.Tensor | None) -> torch.Tensor:
    """[B * s_q, K], -1 for every index that is no key."""
    valid = (indices >= 0) & (indices < cache.shape[0] * cache.shape[1])
    if topk_length is not None:
        valid &= torch.arange(indices.shape[2], device=indices.device) < topk_length[:, None, None]
    return torch.where(valid, indices, -1).flatten(0, 1)


def _check_queries(q: torch.Tensor, k_cache: torch.Tensor, head_dim_v: int, is_fp8_kvcache: bool) -> None:
    check_tensor("q", q, FLOATS, ("B", "s_q", "h_q", "d"))
    _check_cache("k_cache", k_cache, q, is_fp8_kvcache)
    check_value_dim("head_dim_v", head_dim_v, q.shape[3])


def _check_options(causal: bool, is_fp8_kvcache: bool, softmax_scale: float | None, batch_invariant: bool) -> None:
    check_flag("causal", causal)
    check_flag("is_fp8_kvcache", is_fp8_kvcache)
    check_flag("batch_invariant", batch_invariant)
    if softmax_scale is not None:
        check_number("softmax_scale", softmax_scale)


def _check_cache(name: str, cache: torch.Tensor, q: torch.Tensor, is_fp8_kvcache: bool) -> None:
    check_tensor(name, cache, (*FLOATS, *BYTE_DTYPES), ("pages", "P", "h_k", "d"))
    if is_fp8_kvcache != (cache.dtype in BYTE_DTYPES):
        accepted = "uint8, int8 or float8_e4m3fn" if is_fp8_kvcache else "float32, bfloat16 or float16"
        raise ValueError(f"{name}: dtype must be {accepted} with is_fp8_kvcache={is_fp8_kvcache}, got {cache.dtype}")
    if not is_fp8_kvcache:
        check_keys_dtype(q, **{name: cache})
    elif cache.shape[2] != 1:
        raise ValueError(f"{name}: a byte cache must have h_k = 1, got shape {list(cache.shape)}")
    if cache.shape[2] == 0:
        raise ValueError(f"{name}: must have at least one head, got shape {list(cache.shape)}")
    cached = cache_dim(cache[:, :, :1], name)
    if cached != q.shape[3]:
        raise ValueError(
            f"{name}: a last dimension of {cache.shape[-1]} means d = {cached}, but q has d = {q.shape[3]}"
        )


def _check_unused(values: dict[str, torch.Tensor | None], needed: str) -> None:
    for name, value in values.items():
        if value is not None:
            raise ValueError(f"{name}: must be None without {needed}, got {type(value).__name__}")
