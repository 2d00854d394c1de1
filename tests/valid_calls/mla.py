"""Calls of attention: dense and sparse, over windows, and the merge of its branches."""

from functools import partial

import torch

import dsa
from tests.valid_calls.description import BF16, E4M3, F32, INT32, Maker, ValidCall, call

CALLS: list[ValidCall] = []


valid = partial(call, CALLS)


D_V = 512


def _prefill(a):
    rows = tuple(a["q"].shape[:2])
    return [((*rows, a["d_v"]), a["q"].dtype), (rows, F32)]


def _decode(a):
    batch, queries, heads, _ = a["q"].shape
    d_v = a["d_v"] if "d_v" in a else a["head_dim_v"]
    return [((batch, queries, heads, d_v), a["q"].dtype), ((batch, heads, queries), F32)]


def _topk_indices(new: Maker):
    return new.ints([[[0, 3, -1, 3]], [[4, 1, 2, 0]], [[5, -1, -1, -7]]])


@valid("flash_mla_sparse_fwd", lambda a: [*_prefill(a), _prefill(a)[1]])
def _(new: Maker):
    tensors = {"q": new.bf16(3, 2, 576), "kv": new.bf16(5, 1, 576), "indices": _topk_indices(new)}
    return {
        **tensors,
        "sm_scale": 0.04,
        "d_v": D_V,
        "attn_sink": new.f32(2),
        "topk_length": new.ints([4, 2, 0]),
        "out": None,
        "enable_batch_invariant": False,
    }


@valid("flash_mla_sparse_fwd into out", lambda a: [*_prefill(a), _prefill(a)[1]], written=("out",))
def _(new: Maker):
    tensors = {"q": new.bf16(3, 2, 576), "kv": new.bf16(5, 1, 576), "indices": _topk_indices(new)}
    rest = {"attn_sink": None, "topk_length": None, "enable_batch_invariant": True}
    return {**tensors, "sm_scale": 0.04, "d_v": D_V, **rest, "out": new.bf16(3, 2, D_V)}


NO_SELECTION = {
    **dict.fromkeys(("indices", "attn_sink", "extra_k_cache", "extra_indices_in_kvcache")),
    **dict.fromkeys(("topk_length", "extra_topk_length")),
}


def _plan(plan=None, splits=None):
    return {"tile_scheduler_metadata": plan, "num_splits": splits}


@valid("flash_mla_with_kvcache dense", _decode)
def _(new: Maker):
    keys = {"block_table": new.ints([[1, 0], [2, -1]]), "cache_seqlens": new.ints([20, 1])}
    tensors = {"q": new.bf16(2, 2, 2, 576), "k_cache": new.float_cache(3, 16, 576), **keys, "head_dim_v": D_V}
    options = {"softmax_scale": None, "causal": True, "is_fp8_kvcache": False, "enable_batch_invariant": False}
    return {**tensors, **_plan(dsa.get_mla_metadata()[0]), **options, **NO_SELECTION, "out": None}


@valid("flash_mla_with_kvcache dense into out", _decode, written=("out",))
def _(new: Maker):
    keys = {"block_table": new.ints([[1, 0], [2, -1]]), "cache_seqlens": new.ints([20, 1])}
    tensors = {"q": new.bf16(2, 2, 2, 576), "k_cache": new.float_cache(3, 16, 576), **keys, "head_dim_v": D_V}
    options = {"softmax_scale": None, "causal": True, "is_fp8_kvcache": False, "enable_batch_invariant": False}
    return {**tensors, **_plan(), **options, **NO_SELECTION, "out": new.bf16(2, 2, 2, D_V)}


@valid("flash_mla_with_kvcache old plan", _decode)
def _(new: Maker):
    keys = {"block_table": new.ints([[1, 0], [2, -1]]), "cache_seqlens": new.ints([20, 0])}
    tensors = {"q": new.bf16(2, 1, 4, 576), "k_cache": new.float_cache(3, 16, 576), **keys, "head_dim_v": D_V}
    plan = _plan(*dsa.get_mla_metadata(keys["cache_seqlens"], 4, 1))
    options = {"softmax_scale": 0.05, "causal": False, "is_fp8_kvcache": False, "enable_batch_invariant": False}
    return {**tensors, **plan, **options, **NO_SELECTION, "out": None}


def _selection(new: Maker, k_cache: torch.Tensor, extra: torch.Tensor, fp8: bool, out: torch.Tensor | None = None):
    topk_indices = new.ints([[[0, 30, -1]], [[47, 48, 5]]])
    first = {"k_cache": k_cache, "indices": topk_indices, "topk_length": new.ints([3, 2])}
    more = {"extra_k_cache": extra, "extra_indices_in_kvcache": topk_indices[..., :2].clone()}
    options = {
        "softmax_scale": 0.05,
        "causal": False,
        "is_fp8_kvcache": fp8,
        "enable_batch_invariant": True,
        "out": out,
    }
    dense = {"block_table": None, "cache_seqlens": None, "head_dim_v": D_V, "attn_sink": new.f32(2)}
    return {**dense, **first, **more, "extra_topk_length": new.ints([2, 1]), **_plan(), **options}


@valid("flash_mla_with_kvcache sparse", _decode)
def _(new: Maker):
    caches = (new.float_cache(3, 16, 576), new.float_cache(2, 5, 576))
    return {"q": new.bf16(2, 1, 2, 576), **_selection(new, *caches, False)}


@valid("flash_mla_with_kvcache v32", _decode)
def _(new: Maker):
    return {"q": new.bf16(2, 1, 2, 576), **_selection(new, new.v32_cache(3, 16), new.v32_cache(2, 5), True)}


@valid("flash_mla_with_kvcache v32 into out", _decode, written=("out",))
def _(new: Maker):
    caches = (new.v32_cache(3, 16), new.v32_cache(2, 5))
    return {"q": new.bf16(2, 1, 2, 576), **_selection(new, *caches, True, new.bf16(2, 1, 2, D_V))}


@valid("flash_mla_with_kvcache v4", _decode)
def _(new: Maker):
    return {"q": new.bf16(2, 1, 2, 512), **_selection(new, new.v4_cache(3, 16), new.v4_cache(2, 16), True)}


@valid(
    "get_mla_metadata",
    # On a GPU how many parts there are depends on its multiprocessors.
    lambda a: [((None, 8), INT32), ((len(a["cache_seqlens"]) + 1,), INT32)],
)
def _(new: Maker):
    heads = {"num_q_tokens_per_head_k": 4, "num_heads_k": 1, "num_heads_q": 4}
    return {"cache_seqlens": new.ints([20, 0]), **heads, "is_fp8_kvcache": False, "topk": None}


def _windows(new: Maker):
    bounds = {"cu_seqlens_q": new.ints([0, 2, 4]), "cu_seqlens_k": new.ints([0, 3, 5])}
    return {"q": new.bf16(4, 2, 512), "kv": new.bf16(5, 1, 512), **bounds, "window": 2}


def _softmax(new: Maker):
    return {"softmax_scale": 0.05, "d_v": D_V, "attn_sink": new.f32(2)}


@valid("sliding_window_attention", _prefill)
def _(new: Maker):
    return {**_windows(new), **_softmax(new), "indices": None}


@valid("sliding_window_attention listed", _prefill)
def _(new: Maker):
    return {**_windows(new), **_softmax(new), "indices": new.ints([[0, 1], [1, 2], [3, -1], [3, 4]])}


@valid("window_sparse_attention", _prefill)
def _(new: Maker):
    topk_indices = {
        "indices": new.ints([[0, 2, -1], [1, 1, 3], [2, 0, 1], [-1, -1, -1]]),
        "topk_length": new.ints([3, 2, 0, 3]),
    }
    return {**_windows(new), "compressed": new.bf16(3, 1, 512), **topk_indices, **_softmax(new), "window_indices": None}


@valid("window_sparse_attention listed", _prefill)
def _(new: Maker):
    lists = {"indices": new.ints([[0, 2], [1, -1], [2, 0], [1, 1]]), "topk_length": None}
    near = new.ints([[0, 1], [1, 2], [3, -1], [3, 4]])
    return {**_windows(new), "compressed": new.bf16(3, 1, 512), **lists, **_softmax(new), "window_indices": near}


def _cast(a):
    tokens, heads, channels = a["q"].shape
    rows, columns = a["groups"] * tokens, heads // a["groups"] * channels
    return [((rows, columns), E4M3), ((rows, columns // 128), F32)]


@valid("window_attention_cast_to_fp8", _cast)
def _(new: Maker):
    lists = {"compressed": new.bf16(3, 1, 512), "indices": new.ints([[0, 2, -1], [1, 1, 3], [2, 0, 1], [-1, -1, -1]])}
    rest = {"groups": 2, "softmax_scale": 0.05, "attn_sink": new.f32(2), "topk_length": new.ints([3, 2, 0, 3])}
    return {**_windows(new), **lists, **new.angles(4), **rest, "window_indices": None, "use_ue8m0": True}


@valid("window_attention_cast_to_fp8 listed", _cast)
def _(new: Maker):
    none = {"compressed": None, "indices": None}
    rest = {"groups": 1, "softmax_scale": 0.05, "attn_sink": None, "topk_length": None}
    near = new.ints([[0, 1], [1, 2], [3, -1], [3, 4]])
    return {**_windows(new), **none, **new.angles(4), **rest, "window_indices": near, "use_ue8m0": False}


@valid("sliding_window_decode", _decode)
def _(new: Maker):
    keys = {"block_table": new.ints([[1, 0], [2, -1]]), "cache_seqlens": new.ints([20, 1])}
    tensors = {"q": new.bf16(2, 2, 2, 576), "cache": new.float_cache(3, 16, 576), **keys, "window": 3}
    return {**tensors, **_softmax(new), "is_fp8_kvcache": False}


@valid("sliding_window_decode ring", _decode)
def _(new: Maker):
    keys = {"block_table": None, "cache_seqlens": new.ints([20, 1])}
    tensors = {"q": new.bf16(2, 2, 2, 512), "cache": new.v4_cache(2, 16), **keys, "window": 3}
    return {**tensors, **_softmax(new), "is_fp8_kvcache": True}


@valid("mha_varlen_fwd", lambda a: [((*a["q"].shape[:2], a["v"].shape[2]), BF16), (a["q"].shape[1::-1], F32)])
def _(new: Maker):
    tensors = {"q": new.bf16(5, 4, 192), "k": new.bf16(9, 2, 128), "v": new.bf16(9, 2, 128)}
    bounds = {"cu_seqlens_q": new.ints([0, 2, 5]), "cu_seqlens_k": new.ints([0, 3, 9])}
    options = {"max_seqlen_k": 6, "softmax_scale": 0.1, "causal": True, "dense_keys": 0}
    return {**tensors, **bounds, **options, "k_rope": new.bf16(9, 64), "selected": new.ints([[-1, 3, 0, 7]] * 5)}


@valid("selection_bits", lambda a: [((len(a["indices"]), -(-a["max_keys"] // 128) * 4), INT32)])
def _(new: Maker):
    return {"indices": new.ints([[0, 3, -1], [130, 5, 9]]), "starts": new.ints([0, 2]), "max_keys": 140}


@valid("window_indices", lambda a: [((a["total_q"], a["window"]), INT32)])
def _(new: Maker):
    bounds = {"cu_seqlens_q": new.ints([0, 2, 4]), "cu_seqlens_k": new.ints([0, 3, 5])}
    return {**bounds, "total_q": 6, "window": 3}


def _slots(a):
    return [((len(a["cache_seqlens"]), a["s_q"], a["window"]), INT32)]


@valid("window_slots", _slots)
def _(new: Maker):
    keys = {"block_table": new.ints([[1, 0], [2, -1]]), "cache_seqlens": new.ints([20, 1])}
    return {**keys, "s_q": 2, "page_size": 16, "window": 3}


@valid("window_slots ring", _slots)
def _(new: Maker):
    return {"block_table": None, "cache_seqlens": new.ints([20, 1]), "s_q": 2, "page_size": 16, "window": 3}


@valid(
    "merge_attention",
    lambda a: [(tuple(a["outs"][0].shape), a["outs"][0].dtype), (tuple(a["outs"][0].shape[:-1]), F32)],
)
def _(new: Maker):
    outs, lses = [new.bf16(3, 2, 16) for _ in range(2)], [new.f32(3, 2) for _ in range(2)]
    return {"outs": outs, "lses": lses, "attn_sink": new.f32(2)}


def kv_b(new: Maker):
    return new.e4m3(512, 512), new.positive(4, 4)


def _absorbed(a: dict[str, object]) -> tuple[int, ...]:
    return *a["q_nope"].shape[:2], a["kv_b"][0].shape[1] + a["q_pe"].shape[2]


@valid("mla_absorb_queries", lambda a: [(_absorbed(a), a["q_nope"].dtype)])
def _(new: Maker):
    return {"q_nope": new.bf16(3, 2, 128), "q_pe": new.bf16(3, 2, 64), **new.angles(3), "kv_b": kv_b(new)}


def _values(a):
    tokens, heads, _ = a["attended"].shape
    columns = heads * a["v_dim"]
    return [((tokens, columns), E4M3), ((tokens, columns // 128), F32)]


@valid("mla_values_cast_to_fp8", _values)
def _(new: Maker):
    return {"attended": new.bf16(3, 2, 512), "kv_b": kv_b(new), "v_dim": 128, "use_ue8m0": False}
