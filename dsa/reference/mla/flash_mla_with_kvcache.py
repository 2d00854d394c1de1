"""MLA decoding over a paged latent cache: dense, or over the keys that an indexer selected."""

import functools

import torch

from dsa.ops.cache._specs import cache_dim, page_layout
from dsa.reference.autocast import without_autocast
from dsa.reference.cache.kv_cache import BYTE_DTYPES, read_kv_cache
from dsa.reference.mla.mla_metadata import FlashMLASchedMeta, Plan, bind_plan, check_plan, check_plan_tensors, own_plan
from dsa.reference.mla.softmax_attention import apply_sink, attend, queries_at_a_time
from dsa.runtime.arguments import CONTIGUOUS, F32, INNER, ROWS, Arguments, Flag, Int, Number, Tensor
from dsa.runtime.checks import FLOATS, INT32, check_flag, check_memory, shape_of


def latent_cache(shape: str, **options: object) -> Tensor:
    """The spec of a paged cache beside queries q: in their dtype, or bytes."""
    return Tensor(shape, (*FLOATS, *BYTE_DTYPES), like="q", besides=BYTE_DTYPES, mixed=True, **options)


def check_latent_cache(name: str, cache: torch.Tensor, q: torch.Tensor) -> None:
    """What the spec cannot say: its rows stand for as many numbers as queries have."""
    heads = cache.shape[2]
    if heads == 0:
        raise ValueError(f"{name}: must have at least one head, got shape {list(cache.shape)}")
    if heads > 1 and cache.dtype in BYTE_DTYPES:
        raise ValueError(f"{name}: a byte cache must have h_k = 1, got shape {list(cache.shape)}")
    cached, d = cache_dim(cache[:, :, :1], name), q.shape[-1]
    if cached != d:
        raise ValueError(f"{name}: a last dimension of {cache.shape[-1]} means d = {cached}, but q has d = {d}")


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
# Of dense and of sparse decoding. The heads of a query are contiguous; queries may be any distance apart.
OUT = {"out": Tensor("B s_q h_q head_dim_v", FLOATS, like="q", layout=ROWS, merged=(2, 4))}


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
    enable_batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out = softmax_j(softmax_scale * q . k_j) k_j[:head_dim_v] over the keys j of each query.

    Everything is fp32 in between, with the FP8 scales in full precision. The result does not depend on the plan, and no
    sequence's on another. A query without keys has out 0 and lse +inf, and NaN in a cached row reaches only the queries
    that select it. Arguments as of `dsa.flash_mla_with_kvcache`; keys of fp32 queries may have any float dtype.
    Source: FlashMLA's function of this name, which takes fewer caches, head counts and combinations.
    """
    plan = (own_plan(tile_scheduler_metadata), num_splits)
    extra = (extra_k_cache, extra_indices_in_kvcache, extra_topk_length)
    check_options(k_cache, extra_k_cache, indices, plan, causal, is_fp8_kvcache, enable_batch_invariant)
    scale = scale_of(q, softmax_scale)
    if indices is None:
        check_unused(dict(zip(SPARSE_ONLY, (attn_sink, topk_length, *extra))), "indices")
        tensors = (None, None) if isinstance(plan[0], FlashMLASchedMeta) else plan
        dense = (q, k_cache, block_table, cache_seqlens, head_dim_v, *tensors, scale, causal)
        DENSE_MLA_DECODE.check(*dense)
        bind_plan(plan[0], config_of(q, causal, (k_cache, None)))
        return dense_mla_decode(q, k_cache, block_table, cache_seqlens, head_dim_v, scale, causal)
    check_plan_tensors(*plan, q)
    sparse = (q, k_cache, indices, topk_length, *extra, head_dim_v, scale, attn_sink)
    SPARSE_MLA_DECODE.check(*sparse, enable_batch_invariant)
    bind_plan(plan[0], config_of(q, causal, (k_cache, indices), extra[:2]))
    return sparse_mla_decode(*sparse)


SPARSE_ONLY = ("attn_sink", "topk_length", "extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length")


def check_options(
    k_cache: torch.Tensor,
    extra_k_cache: torch.Tensor | None,
    indices: torch.Tensor | None,
    plan: tuple[Plan, torch.Tensor | None],
    causal: bool,
    is_fp8_kvcache: bool,
    enable_batch_invariant: bool,
) -> None:
    """What `flash_mla_with_kvcache` asks of arguments that dense and sparse decoding themselves do not have."""
    check_flag("causal", causal)
    check_flag("enable_batch_invariant", enable_batch_invariant)
    if causal and indices is not None:
        raise ValueError("causal: must be False with indices, got True")
    check_layout_flag("k_cache", k_cache, is_fp8_kvcache)
    if indices is not None and extra_k_cache is not None:
        check_layout_flag("extra_k_cache", extra_k_cache, is_fp8_kvcache)
    check_plan(*plan)


def check_layout_flag(name: str, cache: object, is_fp8_kvcache: bool) -> None:
    """The flag says whether a cache has bytes."""
    check_flag("is_fp8_kvcache", is_fp8_kvcache)
    if isinstance(cache, torch.Tensor) and is_fp8_kvcache != (cache.dtype in BYTE_DTYPES):
        accepted = "uint8, int8 or float8_e4m3fn" if is_fp8_kvcache else "float32, bfloat16 or float16"
        got = str(cache.dtype).removeprefix("torch.")
        raise ValueError(f"{name}: dtype must be {accepted} with is_fp8_kvcache={is_fp8_kvcache}, got {got}")


def scale_of(q: torch.Tensor, softmax_scale: float | None) -> float:
    """softmax_scale, or what None stands for; of a q that checks will refuse, anything."""
    if softmax_scale is not None:
        return softmax_scale
    shape = shape_of(q)
    return shape[-1] ** -0.5 if shape and shape[-1] else 1.0


def check_unused(values: dict[str, torch.Tensor | None], needed: str) -> None:
    for name, value in values.items():
        if value is not None:
            raise ValueError(f"{name}: must be None without {needed}, got {type(value).__name__}")


def config_of(
    q: torch.Tensor, causal: bool, *selections: tuple[torch.Tensor | None, torch.Tensor | None]
) -> dict[str, object]:
    """What a plan remembers of a call: caches and indices, or None for dense decoding's. Tensors are not checked. To be
    read only, for calls of the same shapes get the same one."""
    shapes = tuple((shape_of(cache), shape_of(indices)) for cache, indices in selections)
    config = _config if torch.compiler.is_compiling() else _known_config  # Dynamo warns of caches
    return config(shape_of(q), causal, shapes)


def _config(
    q: tuple[int, ...], causal: bool, selections: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
) -> dict[str, object]:
    """Of shapes, () of what is no tensor."""
    config = {"q": q, "k_cache": selections[0][0][1:], "causal": causal}
    sparse = [(cache, indices) for cache, indices in selections if cache and indices]
    if sparse:
        config["selections"] = [(*cache[1:2], *indices[2:]) for cache, indices in sparse]
    return config


_known_config = functools.lru_cache(256)(_config)


@without_autocast
def dense_mla_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    head_dim_v: int,
    softmax_scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense decoding of checked arguments, whatever the plan: out [B, s_q, h_q, head_dim_v] and lse [B, h_q, s_q]."""
    check_memory("q", q)
    batch, s_q, h_q, _ = q.shape
    pages, page_size, h_k, _ = k_cache.shape
    group = h_q // h_k
    out = torch.zeros(batch, s_q, h_q, head_dim_v, dtype=torch.float32, device=q.device)
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
                keys = kv[None, :seen], slots[None, :seen] >= 0
                row, row_lse, _ = attend(q[b, None, i, heads], *keys, softmax_scale, head_dim_v)
                out[b, i, heads], lse[b, heads, i] = row[0], row_lse[0]
    return out.to(q.dtype), lse


@without_autocast
def sparse_mla_decode(
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sparse decoding of checked arguments: out [B, s_q, h_q, head_dim_v] and lse [B, h_q, s_q], a view of [B, s_q,
    h_q]."""
    check_memory("q", q)
    given = (k_cache, indices, topk_length), (extra_k_cache, extra_indices_in_kvcache, extra_topk_length)
    selections = [(cache, _slots(cache, *rest)) for cache, *rest in given if cache is not None]
    out, lse = _sparse(q.flatten(0, 1), selections, head_dim_v, softmax_scale)
    if attn_sink is not None:
        out = apply_sink(out, lse, attn_sink)
    out, lse = out.unflatten(0, q.shape[:2]), lse.unflatten(0, q.shape[:2])
    return out.to(q.dtype), lse.transpose(1, 2)


def _sparse(
    q: torch.Tensor, selections: list[tuple[torch.Tensor, torch.Tensor]], d_v: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [R, h_q, d] over (cache, slots [R, K]) pairs, -1 for no key: out [R, h_q, d_v] and lse [R, h_q]."""
    rows, h_q, d = q.shape
    out = torch.empty(rows, h_q, d_v, dtype=torch.float32, device=q.device)
    lse = torch.empty(rows, h_q, dtype=torch.float32, device=q.device)
    chunk = queries_at_a_time(sum(slots.shape[1] for _, slots in selections), d, q.device)
    for first in range(0, rows, chunk):
        part = slice(first, first + chunk)
        kv = torch.cat([read_kv_cache(cache, slots[part]) for cache, slots in selections], dim=1)
        valid = torch.cat([slots[part] >= 0 for _, slots in selections], dim=1)
        out[part], lse[part], _ = attend(q[part], kv, valid, scale, d_v)
    return out, lse


def _slots(cache: torch.Tensor, indices: torch.Tensor, topk_length: torch.Tensor | None) -> torch.Tensor:
    """[B * s_q, K], -1 for every index that is no key."""
    valid = (indices >= 0) & (indices < cache.shape[0] * cache.shape[1])
    if topk_length is not None:
        valid &= torch.arange(indices.shape[2], device=indices.device) < topk_length[:, None, None]
    return torch.where(valid, indices, -1).flatten(0, 1)
