"""Calls of the indexer's training."""

from functools import partial

import torch

from tests.valid_calls.description import F32, INT32, Maker, ValidCall, call

CALLS: list[ValidCall] = []


valid = partial(call, CALLS)


D_V = 512


def _topk_indices(new: Maker):
    return new.ints([[[0, 3, -1, 3]], [[4, 1, 2, 0]], [[5, -1, -1, -7]]])


def _trained(a):
    (tokens, heads, _), work = a["q"].shape, torch.float64 if a["q"].dtype == torch.float64 else F32
    return [((tokens, heads, a["d_v"]), a["q"].dtype), ((heads, tokens), work)]


@valid("sparse_mla_attention", _trained)
def _(new: Maker):
    tensors = {"q": new.bf16(3, 2, 576), "kv": new.bf16(5, 1, 576), "indices": _topk_indices(new)}
    return {**tensors, "softmax_scale": 0.04, "d_v": D_V, "attn_sink": new.f32(2), "deterministic": None}


def _indexer(new: Maker, heads: int = 8):
    return {"q_idx": new.bf16(5, heads, 64), "k_idx": new.bf16(7, 64), "w_idx": new.f32(5, heads)}


def _packed(new: Maker):
    bounds = {"cu_seqlens_q": new.ints([0, 3, 5]), "cu_seqlens_k": new.ints([0, 5, 7])}
    return {**bounds, "max_seqlen_q": 3, "max_seqlen_k": 5}


@valid("indexer_topk", lambda a: [((len(a["q_idx"]), 1, a["top_k"]), INT32)])
def _(new: Maker):
    return {**_indexer(new), "top_k": 3, **_packed(new), "causal": True}


def _warmup(a):
    (tokens, heads, _), work = a["q"].shape, torch.float64 if a["q"].dtype == torch.float64 else F32
    return [((tokens, heads, a["v"].shape[2]), a["q"].dtype), ((heads, tokens), work), ((tokens,), work)]


@valid("indexer_warmup_attention", _warmup)
def _(new: Maker):
    attention = {"q": new.bf16(5, 8, 64), "k": new.bf16(7, 2, 64), "v": new.bf16(7, 2, 64)}
    return {**attention, **_indexer(new), **_packed(new), "softmax_scale": 0.125, "causal": True}


@valid(
    "sparse_indexer_loss",
    lambda a: [((len(a["q"]),), torch.float64 if a["q"].dtype == torch.float64 else F32)],
)
def _(new: Maker):
    attention = {"q": new.bf16(5, 2, 512), "kv": new.bf16(7, 1, 512)}
    topk_indices = new.ints([[[0, 3, -1]], [[6, 6, 1]], [[7, -1, -1]], [[2, 0, 5]], [[4, 1, 3]]])
    return {
        **{**attention, **_indexer(new), "indices": topk_indices, "softmax_scale": 0.04, "lse": new.f32(2, 5)},
        "deterministic": False,
    }
