"""Calls with nothing to compute launch no kernel and return the results of the reference."""

from typing import Any

import pytest
import torch

from dsa.cases import CASES
from dsa.cases.case import same_bits

NO_BOUNDS = {"cu_seqlens_q": torch.zeros(3, dtype=torch.int32), "cu_seqlens_k": torch.zeros(3, dtype=torch.int32)}
NO_QUERIES, NO_KEYS = {"cu_seqlens_q": NO_BOUNDS["cu_seqlens_q"]}, {"cu_seqlens_k": NO_BOUNDS["cu_seqlens_k"]}
NO_TOKENS = torch.zeros(3, dtype=torch.int32)
# (name of a call, {dimension: names of the arguments whose size is 0 in this dimension}, other changed arguments).
EMPTY: list[tuple[str, dict[int, str], dict[str, Any]]] = [
    ("write_indexer_cache", {0: "k k_scale slots"}, {}),
    ("write_indexer_cache", {0: "cache"}, {"slots": torch.full((3,), -1)}),
    ("read_indexer_cache", {0: "slots"}, {}),
    ("read_indexer_cache", {0: "cache"}, {}),
    ("read_indexer_cache into k", {0: "cache"}, {}),
    *((f"write_kv_cache {kind}", {0: "kv slots"}, {}) for kind in ("float", "v32", "v4")),
    *((f"write_kv_cache {kind}", {0: "cache"}, {"slots": torch.full((4,), -1)}) for kind in ("float", "v32", "v4")),
    *((f"read_kv_cache {kind}", {0: names}, {}) for kind in ("float", "v32", "v4") for names in ("slots", "cache")),
    ("write_mla_cache v32", {0: "kv cos sin slots out"}, {}),
    ("write_mla_cache v32", {0: "cache"}, {"out": None, "slots": torch.full((4,), -1)}),
    ("write_compressed_kv", {0: "kv gate cos sin slots"}, {"cu_seqlens": NO_TOKENS}),
    ("slot_mapping", {}, {"num_tokens": 0}),
    ("slot_mapping", {1: "block_table"}, {}),
    ("rms_norm", {0: "x"}, {}),
    ("rms_norm", {1: "x"}, {}),
    ("rms_norm_rotary", {0: "x cos sin"}, {}),
    ("rms_norm_rotary", {1: "x"}, {}),
    ("rms_norm_cast_to_fp8", {0: "x"}, {}),
    ("add_rms_norm_cast_to_fp8", {0: "x residual"}, {}),
    ("apply_rotary", {0: "x cos sin"}, {}),
    ("apply_rotary", {1: "x"}, {}),
    ("apply_rotary into out", {0: "x cos sin out"}, {}),
    ("hyper_collapse", {0: "streams mix"}, {}),
    ("hyper_collapse_independent", {0: "streams mix"}, {}),
    ("hyper_expand", {0: "y streams post comb"}, {}),
    ("hyper_mix", {0: "streams"}, {}),
    ("hyper_collapse_norm_cast_to_fp8", {0: "streams mix"}, {}),
    ("hyper_collapse_independent_norm_cast_to_fp8", {0: "streams mix"}, {}),
    ("hyper_expand_mix", {0: "y streams post comb"}, {}),
    ("hyper_head", {0: "streams mix"}, {}),
    ("per_token_cast_to_fp8", {0: "x"}, {}),
    ("per_token_cast_to_fp8", {1: "x"}, {}),
    ("scatter_cast_to_fp8", {0: "x places"}, {}),
    ("scatter_cast_to_fp8", {1: "x"}, {}),
    ("scatter_cast_to_fp8", {1: "places"}, {}),
    ("rotary_cast_to_fp8", {0: "x cos sin"}, {}),
    ("rotary_cast_to_fp8", {1: "x"}, {}),
    ("swiglu_cast_to_fp8", {0: "gate up"}, {}),
    ("swiglu_cast_to_fp8", {1: "gate up"}, {}),
    ("gate_cast_to_fp8", {0: "gate x"}, {}),
    ("gate_cast_to_fp8", {1: "gate x"}, {}),
    ("fp8_gemm_nt", {0: "a"}, {}),
    ("fp8_gemm_nt", {0: "b"}, {}),
    ("fp8_gemm_nt", {1: "a b"}, {}),
    *(
        (f"grouped_{kind}", {0: "rows weights"}, {"ends": NO_TOKENS, "expected_rows": 0})
        for kind in ("fp8_gemm_nt", "fp8_fp4_gemm_nt")
    ),
    *(
        (f"grouped_{kind}", {0: "a b ends"}, {"rows": None, "weights": None, "expected_rows": None})
        for kind in ("fp8_gemm_nt", "fp8_fp4_gemm_nt")
    ),
    ("grouped_fp8_gemm_nt", {1: "a", 2: "b"}, {}),
    ("grouped_fp8_gemm_nt", {1: "b"}, {}),
    *(
        (f"grouped_{kind}", {0: "rows"}, {"ends": NO_TOKENS, "expected_rows": 0})
        for kind in ("fp8_gemm_swiglu", "fp8_fp4_gemm_swiglu")
    ),
    ("linear_fp32", {0: "x"}, {}),
    ("linear_fp32", {0: "weight"}, {"scaled_from": 0}),
    ("linear_fp32", {1: "x weight"}, {}),
    ("quantize_indexer_queries", {0: "q weights cos sin"}, {}),
    ("quantize_indexer_queries", {1: "q weights"}, {}),
    ("write_indexer_keys", {0: "k cos sin slots"}, {}),
    ("write_indexer_keys", {0: "cache"}, {"slots": torch.full((3,), -1)}),
    ("fp8_mqa_logits", {0: "q weights cu_seq_len_k_start cu_seq_len_k_end"}, {}),
    ("fp8_mqa_logits", {0: "kv"}, {}),
    ("fp8_mqa_logits compressed", {0: "kv"}, {"clean_logits": False}),
    ("fp8_paged_mqa_logits", {0: "q weights context_lens block_table"}, {}),
    ("fp8_paged_mqa_logits", {0: "kv_cache"}, {}),
    ("fp8_paged_mqa_logits", {1: "block_table"}, {}),
    ("indexer_select", {0: "q weights cu_seq_len_k_start cu_seq_len_k_end"}, {}),
    ("indexer_select", {0: "kv"}, {}),
    ("paged_indexer_select", {0: "q weights context_lens block_table"}, {}),
    ("paged_indexer_select", {0: "kv_cache"}, {}),
    ("paged_indexer_select of slots", {1: "block_table"}, {}),
    ("topk_indices", {0: "scores starts lengths"}, {}),
    ("topk_indices", {1: "scores"}, {}),
    ("topk_indices into out", {1: "scores"}, {}),
    *(
        (name, *changes)
        for name in ("flash_mla_sparse_fwd", "flash_mla_sparse_fwd into out")
        for changes in (({0: "kv"}, {}), ({2: "indices"}, {}))
    ),
    ("flash_mla_sparse_fwd", {0: "q indices topk_length"}, {}),
    ("flash_mla_with_kvcache sparse", {0: "k_cache extra_k_cache"}, {}),
    ("flash_mla_with_kvcache sparse", {2: "indices extra_indices_in_kvcache"}, {}),
    ("flash_mla_with_kvcache sparse", {1: "q indices extra_indices_in_kvcache"}, {}),
    ("flash_mla_with_kvcache v32 into out", {0: "k_cache extra_k_cache"}, {}),
    ("flash_mla_with_kvcache old plan", {0: "k_cache"}, {}),
    ("flash_mla_with_kvcache old plan", {1: "block_table"}, {}),
    ("flash_mla_with_kvcache old plan", {1: "q"}, {}),
    ("flash_mla_with_kvcache old plan", {2: "q"}, {}),
    ("sliding_window_attention", {0: "q"}, NO_QUERIES),
    ("sliding_window_attention listed", {0: "q indices"}, NO_QUERIES),
    ("sliding_window_attention", {0: "kv"}, NO_BOUNDS | {"q": torch.zeros(0, 2, 512, dtype=torch.bfloat16)}),
    ("sliding_window_attention", {1: "q"}, {"attn_sink": None}),
    ("sliding_window_decode", {0: "q block_table cache_seqlens"}, {}),
    ("sliding_window_decode", {1: "q"}, {}),
    ("window_attention_cast_to_fp8", {0: "q indices cos sin topk_length"}, NO_QUERIES),
    ("window_indices", {}, {"total_q": 0}),
    ("window_slots", {0: "block_table cache_seqlens"}, {}),
    ("window_slots", {1: "block_table"}, {}),
    ("window_slots", {}, {"s_q": 0}),
    ("mha_varlen_fwd", {0: "q selected"}, NO_QUERIES),
    ("mha_varlen_fwd", {0: "k v k_rope"}, NO_KEYS),
    ("selection_bits", {}, {"max_keys": 0}),
    ("merge_attention", {0: "outs lses"}, {}),
    ("merge_attention", {1: "outs lses"}, {"attn_sink": None}),
    ("mla_absorb_queries", {0: "q_nope q_pe cos sin"}, {}),
    ("mla_values_cast_to_fp8", {0: "attended"}, {}),
    ("moe_gate", {0: "logits"}, {}),
    ("combine_experts", {0: "y"}, {}),
    ("combine_experts", {0: "rows weights shared residual"}, {}),
    ("combine_experts", {1: "rows weights"}, {}),
    ("route_to_experts", {0: "x"}, {}),
    ("route_by_table", {0: "x tokens"}, {}),
    ("sparse_mla_attention", {0: "q indices"}, {}),
    ("sparse_mla_attention", {0: "kv"}, {}),
    ("sparse_mla_attention", {2: "indices"}, {}),
    ("sparse_indexer_loss", {0: "kv k_idx"}, {}),
    ("sparse_indexer_loss", {2: "indices"}, {}),
]


def without(value: Any, dim: int) -> Any:
    """Return a tensor, or each tensor of an operand, with size 0 in dimension `dim`."""
    if isinstance(value, list | tuple):
        return type(value)(without(x, dim) for x in value)
    return value.narrow(dim, 0, 0)


@pytest.mark.parametrize(("name", "empty", "changes"), EMPTY, ids=[f"{name}-{empty}" for name, empty, _ in EMPTY])
def test_nothing_to_compute_launches_nothing(name, empty, changes, request):
    call = next(call for call in CASES if call.name == name)
    with_kernels, without_kernels = call.arguments(), call.arguments()
    for given in (with_kernels, without_kernels):
        given |= changes
        for dim, names in empty.items():
            given |= {argument: without(given[argument], dim) for argument in names.split()}
    expected = call.results(without_kernels)
    launches = request.getfixturevalue("launches")
    got = call.results(with_kernels)
    assert not launches
    assert len(got) == len(expected) and all(map(same_bits, got, expected))
