"""Calls of what writes and reads caches."""

import itertools
from functools import partial

import torch

from tests.valid_calls.description import BF16, E4M3, F32, Maker, ValidCall, call, nothing

CALLS: list[ValidCall] = []


valid = partial(call, CALLS)


@valid("write_indexer_cache", nothing, written=("cache",))
def _(new: Maker):
    cache = {"cache": new.index_cache(3, 16, 32), "slots": new.ints([7, -1, 40], torch.int64)}
    return {"k": new.e4m3(3, 32), "k_scale": new.positive(3), **cache}


@valid(
    "read_indexer_cache",
    lambda a: [((len(a["slots"]), a["cache"].shape[3] - 4), E4M3), ((len(a["slots"]),), F32)],
)
def _(new: Maker):
    slots = new.ints([7, -1, 48, 40])
    return {"cache": new.index_cache(3, 16, 32), "slots": slots, "k": None, "k_scale": None}


@valid(
    "read_indexer_cache into k",
    lambda a: [((len(a["slots"]), a["cache"].shape[3] - 4), E4M3), ((len(a["slots"]),), F32)],
    written=("k", "k_scale"),
)
def _(new: Maker):
    cache = {"cache": new.index_cache(3, 16, 32), "slots": new.ints([7, -1, 48, 40])}
    return {**cache, "k": new.e4m3(4, 32), "k_scale": new.positive(4)}


@valid("make_v4_cache", lambda a: [((a["pages"], a["page_size"], 1, 584), torch.uint8)])
def _(new: Maker):
    return {"pages": 3, "page_size": 4, "device": new.device}


def _cache(new: Maker, kind: str) -> torch.Tensor:
    return new.float_cache(3, 16, 576) if kind == "float" else getattr(new, f"{kind}_cache")(3, 16)


def _add_caches(kind: str) -> None:
    @valid(f"write_kv_cache {kind}", nothing, written=("cache",))
    def _(new: Maker):
        cache, kv = _cache(new, kind), new.bf16(4, 512 if kind == "v4" else 576)
        return {"kv": kv, "cache": cache, "slots": new.ints([7, -1, 40, 0]), "use_ue8m0": True}

    @valid(f"read_kv_cache {kind}", lambda a: [((*a["slots"].shape, _dim(a["cache"])), a["dtype"])])
    def _(new: Maker):
        slots = new.ints([[7, -1], [40, 3]], torch.int64)
        return {"cache": _cache(new, kind), "slots": slots, "dtype": BF16}

    @valid(f"write_mla_cache {kind}", nothing, written=("cache", "out"))
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


@valid("compress_kv", _entries, written=("state",))
def _(new: Maker):
    return _new_tokens(new, 16)


@valid("compress_kv without a state", _entries)
def _(new: Maker):
    return _new_tokens(new, 16) | {"starts": new.ints([0, 0]), "state": None, "state_slots": None}


@valid("write_compressed_kv", nothing, written=("cache", "state"))
def _(new: Maker):
    cache = {"cache": new.v4_cache(2, 16), "slots": new.ints([3, -1, -1, -1, -1, 20, -1])}
    return {**_new_tokens(new, 1024), "norm_weight": new.f32(512), **new.angles(7), **cache, "eps": 1e-6}


@valid("write_compressed_kv index", nothing, written=("cache", "state"))
def _(new: Maker):
    cache = {"cache": new.index_cache(2, 16, 128), "slots": new.ints([3, -1, -1, -1, -1, 20, -1], torch.int64)}
    return {**_new_tokens(new, 256), "norm_weight": new.f32(128), **new.angles(7), **cache, "eps": 1e-6}


def _slots(a):
    return [((a["num_tokens"],), torch.int64)]


@valid("slot_mapping", _slots)
def _(new: Maker):
    keys = {"block_table": new.ints([[1, 0], [2, -1]]), "cu_seqlens": new.ints([0, 3, 4])}
    keys["cache_seqlens"] = new.ints([20, 1])
    return {**keys, "num_tokens": 6, "page_size": 4, "ratio": 4, "ring": False}


@valid("slot_mapping ring", _slots)
def _(new: Maker):
    keys = {"block_table": new.ints([[1], [2]]), "cu_seqlens": new.ints([0, 3, 4]), "cache_seqlens": new.ints([20, 1])}
    return {**keys, "num_tokens": 6, "page_size": 16, "ratio": 1, "ring": True}


@valid("slot_mapping all", _slots)
def _(new: Maker):
    keys = {"block_table": new.ints([[1, 0], [2, -1]]), "cu_seqlens": new.ints([0, 3, 4]), "cache_seqlens": None}
    return {**keys, "num_tokens": 4, "page_size": 4, "ratio": 1, "ring": False}
