"""Calls of what makes inputs: norms, rope, casts, products, experts, caches."""

import itertools
from functools import partial

import torch

from tests.valid_calls.description import BF16, F32, INT32, Maker, ValidCall, call, like, nothing

CALLS: list[ValidCall] = []
valid = partial(call, CALLS)
E4M3 = torch.float8_e4m3fn


def cast(name):
    """e4m3 like the argument, and a scale for each 128 channels."""

    def promise(a):
        *leading, channels = a[name].shape
        return [((*leading, channels), E4M3), ((*leading, -(-channels // 128)), F32)]

    return promise


@valid("rms_norm", like("x"))
def _(new: Maker):
    return {"x": new.bf16(3, 2, 16), "weight": new.f32(16), "eps": 1e-6}


@valid("apply_rotary", like("x"))
def _(new: Maker):
    return {"x": new.bf16(3, 2, 80), **new.angles(3), "interleaved": True, "dims": "first", "out": None}


@valid("apply_rotary into out", like("x"), written="out")
def _(new: Maker):
    return {"x": new.bf16(3, 80), **new.angles(3), "interleaved": False, "dims": "last", "out": new.bf16(3, 80)}


@valid("per_token_cast_to_fp8", cast("x"))
def _(new: Maker):
    return {"x": new.bf16(3, 256), "use_ue8m0": False, "gran_k": 128, "hadamard": True}


@valid("swiglu_cast_to_fp8", cast("gate"))
def _(new: Maker):
    return {"gate": new.bf16(3, 200), "up": new.bf16(3, 200), "use_ue8m0": True, "limit": 2.0}


@valid("per_block_cast_to_fp8", lambda a: [_block(a["w"].shape, E4M3), _scales(a["w"].shape, a["block"])])
def _(new: Maker):
    return {"w": new.f32(150, 140), "use_ue8m0": False, "block": 128}


@valid("dequantize_per_block", lambda a: [_block(a["q"].shape, a["dtype"])])
def _(new: Maker):
    return {"q": new.e4m3(150, 140), "scale": new.positive(2, 2), "dtype": BF16, "block": 128}


def _block(shape, dtype):
    return tuple(shape), dtype


def _scales(shape, block):
    return tuple(-(-n // block) for n in shape), F32


@valid("fp8_gemm_nt", lambda a: [((*a["a"][0].shape[:-1], len(a["b"][0])), a["out_dtype"])])
def _(new: Maker):
    a, b = (new.e4m3(3, 160), new.positive(3, 2)), (new.e4m3(136, 160), new.positive(2, 2))
    return {"a": a, "b": b, "out_dtype": F32}


@valid("grouped_fp8_gemm_nt", lambda a: [((len(a["a"][0]), a["b"][0].shape[1]), a["out_dtype"])], integers="ends")
def _(new: Maker):
    a, b = (new.e4m3(5, 160), new.positive(5, 2)), (new.e4m3(3, 16, 160), new.positive(3, 1, 2))
    return {"a": a, "b": b, "ends": new.ints([2, 2, 5]), "out_dtype": BF16}


@valid("moe_gate", lambda a: [((len(a["logits"]), a["top_k"]), x) for x in (torch.int64, F32)])
def _(new: Maker):
    groups = {"n_group": 4, "topk_group": 2, "normalise": True, "scale": 2.5}
    return {"logits": new.f32(3, 16), "bias": new.f32(16), "top_k": 3, "scores": "sigmoid", **groups}


@valid(
    "sort_by_expert",
    lambda a: [((a["experts"].numel(),), INT32), (tuple(a["experts"].shape), INT32), ((a["count"],), INT32)],
    integers="experts",
)
def _(new: Maker):
    return {"experts": new.ints([[2, 0], [7, 2], [0, -1]]), "count": 4}


@valid("combine_experts", lambda a: [((len(a["rows"]), a["y"].shape[1]), a["y"].dtype)], integers="rows")
def _(new: Maker):
    rows = new.ints([[0, 3], [5, -1], [2, 2]])
    return {"y": new.bf16(6, 16), "rows": rows, "weights": new.f32(3, 2), "shared": new.bf16(3, 16)}


@valid(
    "hyper_collapse",
    lambda a: [
        (tuple(a["streams"][:, 0].shape), a["streams"].dtype),
        (tuple(a["streams"].shape[:2]), F32),
        ((*a["streams"].shape[:2], a["streams"].shape[1]), F32),
    ],
)
def _(new: Maker):
    tensors = {"streams": new.bf16(3, 4, 16), "mix": new.f32(3, 24), "base": new.f32(24), "scale": new.f32(3)}
    return {**tensors, "iterations": 3, "eps": 1e-6, "hc_eps": 1e-6}


@valid("hyper_expand", like("streams"))
def _(new: Maker):
    return {"y": new.bf16(3, 16), "streams": new.bf16(3, 4, 16), "post": new.f32(3, 4), "comb": new.f32(3, 4, 4)}


@valid("make_v4_cache", lambda a: [((a["pages"], a["page_size"], 1, 584), torch.uint8)])
def _(new: Maker):
    return {"pages": 3, "page_size": 4, "device": new.device}


def _cache(new: Maker, kind: str) -> torch.Tensor:
    return new.float_cache(3, 16, 576) if kind == "float" else getattr(new, f"{kind}_cache")(3, 16)


def _add_caches(kind: str) -> None:
    @valid(f"write_kv_cache {kind}", nothing, written="cache", integers="slots")
    def _(new: Maker):
        cache, kv = _cache(new, kind), new.bf16(4, 512 if kind == "v4" else 576)
        return {"kv": kv, "cache": cache, "slots": new.ints([7, -1, 40, 0]), "use_ue8m0": True}

    @valid(f"read_kv_cache {kind}", lambda a: [((*a["slots"].shape, _dim(a["cache"])), a["dtype"])], integers="slots")
    def _(new: Maker):
        slots = new.ints([[7, -1], [40, 3]], torch.int64)
        return {"cache": _cache(new, kind), "slots": slots, "dtype": BF16}

    @valid(f"write_mla_cache {kind}", nothing, written="cache out", integers="slots")
    def _(new: Maker):
        d = 512 if kind == "v4" else 576
        kv = {"kv": new.bf16(4, d), "norm_weight": new.f32(512), **new.angles(4)}
        cache = {"cache": _cache(new, kind), "slots": new.ints([7, -1, 40, 0], torch.int64)}
        return {**kv, **cache, "eps": 1e-6, "interleaved": True, "use_ue8m0": True, "out": new.bf16(4, d)}


def _dim(cache: torch.Tensor) -> int:
    return {656: 576, 584: 512}[cache.shape[3]] if cache.element_size() == 1 else cache.shape[3]


for _kind in ("float", "v32", "v4"):
    _add_caches(_kind)


def _new_tokens(new: Maker, c: int):
    """Two sequences, of which the first has three tokens already."""
    sequences = {"cu_seqlens": new.ints([0, 4, 7]), "starts": new.ints([3, 0])}
    state = {"state": new.f32(3, 8, 2, c), "state_slots": new.ints([2, 0])}
    return {"kv": new.bf16(7, c), "gate": new.bf16(7, c), "ape": new.f32(4, c), **sequences, **state, "overlap": True}


def _entries(a):
    """How many blocks the new tokens end."""
    m, (starts, bounds) = len(a["ape"]), (a[name].tolist() for name in ("starts", "cu_seqlens"))
    lengths = (high - low for low, high in itertools.pairwise(bounds))
    count = sum((start + length) // m - start // m for start, length in zip(starts, lengths))
    c = a["kv"].shape[1]
    return [((count, c // 2 if a["overlap"] else c), F32), ((count,), torch.int64)]


@valid("compress_kv", _entries, written="state", integers="cu_seqlens starts state_slots")
def _(new: Maker):
    return _new_tokens(new, 16)


@valid("compress_kv without a state", _entries, integers="cu_seqlens starts")
def _(new: Maker):
    return _new_tokens(new, 16) | {"starts": new.ints([0, 0]), "state": None, "state_slots": None}


@valid("write_compressed_kv", nothing, written="cache state", integers="slots cu_seqlens starts state_slots")
def _(new: Maker):
    cache = {"cache": new.v4_cache(2, 16), "slots": new.ints([3, -1, -1, -1, -1, 20, -1])}
    return {**_new_tokens(new, 1024), "norm_weight": new.f32(512), **new.angles(7), **cache, "eps": 1e-6}


@valid("write_compressed_kv index", nothing, written="cache state", integers="slots cu_seqlens starts state_slots")
def _(new: Maker):
    cache = {"cache": new.index_cache(2, 16, 128), "slots": new.ints([3, -1, -1, -1, -1, 20, -1], torch.int64)}
    return {**_new_tokens(new, 256), "norm_weight": new.f32(128), **new.angles(7), **cache, "eps": 1e-6}
