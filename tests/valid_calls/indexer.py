"""Calls of the lightning indexer: its inputs, its scores and their selection."""

from functools import partial

import torch

from dsa.kernels.indexer.select_limits import TWO_OPS_KEYS
from tests.valid_calls.description import BF16, E4M3, F32, INT32, Maker, ValidCall, call, nothing

CALLS: list[ValidCall] = []


valid = partial(call, CALLS)


@valid("quantize_indexer_queries", lambda a: [(tuple(a["q"].shape), E4M3), (tuple(a["q"].shape[:2]), F32)])
def _(new: Maker):
    options = {"interleaved": False, "dims": "first", "use_ue8m0": False}
    return {"q": new.bf16(3, 2, 128), "weights": new.f32(3, 2), **new.angles(3), **options}


@valid("write_indexer_keys", nothing, written=("cache",))
def _(new: Maker):
    options = {"eps": 1e-6, "interleaved": True, "dims": "last", "use_ue8m0": True}
    norm = {"norm_weight": new.f32(128), "norm_bias": new.f32(128)}
    cache = {"cache": new.index_cache(3, 16, 128), "slots": new.ints([7, -1, 40])}
    return {"k": new.bf16(3, 128), **norm, **new.angles(3), **cache, **options}


def _logits(a):
    k = a["kv"][0] if "kv" in a else a["k"]
    return [((len(a["q"]), a.get("max_seqlen_k") or len(k)), a.get("logits_dtype", F32))]


def _ranges(new: Maker):
    return {"cu_seq_len_k_start": new.ints([0, 2, 5]), "cu_seq_len_k_end": new.ints([7, 5, 5])}


@valid("fp8_mqa_logits", _logits)
def _(new: Maker):
    options = {"clean_logits": True, "max_seqlen_k": 0, "logits_dtype": F32, "accumulators": torch.float16}
    kv = new.e4m3(7, 32), new.positive(7)
    return {"q": new.e4m3(3, 8, 32), "kv": kv, "weights": new.f32(3, 8), **_ranges(new), **options}


@valid("fp8_mqa_logits compressed", _logits)
def _(new: Maker):
    options = {"clean_logits": True, "max_seqlen_k": 5, "logits_dtype": BF16, "accumulators": F32}
    kv = new.e4m3(7, 32), new.positive(7)
    return {"q": new.e4m3(3, 8, 32), "kv": kv, "weights": new.f32(3, 8), **_ranges(new), **options}


@valid("mqa_logits", _logits)
def _(new: Maker):
    return {"q": new.bf16(3, 8, 32), "k": new.bf16(7, 32), "weights": new.f32(3, 8), **_ranges(new)}


@valid("get_paged_mqa_logits_metadata", lambda a: [((a["num_sms"] + 1, 2), INT32)])
def _(new: Maker):
    return {"context_lens": new.ints([70, 0]), "block_kv": 32, "num_sms": 5}


@valid(
    "fp8_paged_mqa_logits",
    lambda a: [((a["q"].shape[0] * a["q"].shape[1], a["max_context_len"]), a["logits_dtype"])],
)
def _(new: Maker):
    tensors = {"q": new.e4m3(2, 2, 8, 32), "kv_cache": new.index_cache(3, 32, 32), "weights": new.f32(4, 8)}
    lengths = {"context_lens": new.ints([[39, 40], [0, 1]]), "block_table": new.ints([[2, 0], [1, -1]])}
    options = {"max_context_len": 50, "clean_logits": True, "logits_dtype": F32, "accumulators": torch.float16}
    return {**tensors, **lengths, "schedule_meta": new.ints([[0, 0], [1, 0], [2, 0]]), **options}


def _selected(a):
    shape = len(a["q"]), a["top_k"]
    return [(shape, INT32), (shape, F32)][: 1 + a["return_values"]]


@valid("indexer_select", _selected)
def _(new: Maker):
    kv, paging = (new.e4m3(7, 32), new.positive(7)), {"block_table": None, "page_size": None, "row_to_seq": None}
    scores = {"q": new.e4m3(3, 8, 32), "kv": kv, "weights": new.f32(3, 8), **_ranges(new)}
    return {**scores, "top_k": 4, **paging, "return_values": True, "accumulators": F32}


@valid("indexer_select paged", _selected)
def _(new: Maker):
    kv, table = (new.e4m3(7, 32), new.positive(7)), {"block_table": new.ints([[2, 0], [1, -1]]), "page_size": 4}
    scores = {"q": new.e4m3(3, 8, 32), "kv": kv, "weights": new.f32(3, 8), **_ranges(new)}
    rest = {"row_to_seq": new.ints([0, 1, 1]), "return_values": False, "accumulators": torch.float16}
    return {**scores, "top_k": 4, **table, **rest}


@valid("indexer_select of many keys", _selected)
def _(new: Maker):
    count = TWO_OPS_KEYS + 9  # so that they are selected as they are scored
    kv, table = (new.e4m3(count, 32), new.positive(count)), {"block_table": new.ints([[2, 0], [1, -1]]), "page_size": 4}
    scores = {"q": new.e4m3(3, 8, 32), "kv": kv, "weights": new.f32(3, 8), **_ranges(new)}
    rest = {"row_to_seq": new.ints([0, 1, 1]), "return_values": True, "accumulators": torch.float16}
    return {**scores, "top_k": 4, **table, **rest}


def _selected_of_pages(a):
    shape = a["q"].shape[0] * a["q"].shape[1], a["top_k"]
    return [(shape, INT32), (shape, F32)][: 1 + a["return_values"]]


def _paged_keys(new: Maker):
    tensors = {"q": new.e4m3(2, 2, 8, 32), "kv_cache": new.index_cache(3, 32, 32), "weights": new.f32(4, 8)}
    return {**tensors, "block_table": new.ints([[2, 0], [1, -1]]), "max_context_len": 50}


@valid("paged_indexer_select", _selected_of_pages)
def _(new: Maker):
    options = {"slots": False, "return_values": True, "accumulators": torch.float16}
    return {**_paged_keys(new), "context_lens": new.ints([[39, 40], [0, 1]]), "top_k": 4, **options}


@valid("paged_indexer_select of slots", _selected_of_pages)
def _(new: Maker):
    options = {"slots": True, "return_values": False, "accumulators": F32}
    return {**_paged_keys(new), "context_lens": new.ints([40, 1]), "top_k": 9, **options}


def _topk(a):
    shape = len(a["scores"]), a["k"]
    return [(shape, INT32), (shape, F32)][: 1 + a["return_values"]]


@valid("topk_indices", _topk)
def _(new: Maker):
    part = {"starts": new.ints([0, 5, 2]), "lengths": new.ints([20, 3, 9])}
    paging = {"block_table": None, "page_size": None, "row_to_seq": None}
    return {"scores": new.bf16(3, 20), "k": 4, **part, **paging, "sorted": True, "return_values": True, "out": None}


@valid("topk_indices paged", _topk)
def _(new: Maker):
    part = {"starts": None, "lengths": new.ints([20, 3, 9])}
    paging = {"block_table": new.ints([[2, 0, 1], [3, -1, 5]]), "page_size": 8, "row_to_seq": new.ints([1, 0, 0])}
    return {"scores": new.f32(3, 20), "k": 4, **part, **paging, "sorted": False, "return_values": False, "out": None}


@valid("topk_indices into out", _topk, written=("out",))
def _(new: Maker):
    part = {"starts": new.ints([0, 5, 2]), "lengths": new.ints([20, 3, 9])}
    paging = {"block_table": None, "page_size": None, "row_to_seq": None}
    out = new.ints([[9] * 4] * 3)
    return {"scores": new.f32(3, 20), "k": 4, **part, **paging, "sorted": True, "return_values": True, "out": out}
