"""PyTorch references of all ops. Their code follows the formulas of the papers, and calls no kernel of dsa.

They compute in fp32. The references of training also accept float64 inputs, and then compute in float64. The ops check
the types, dtypes and shapes of arguments; the references check only contents, such as slots and boundaries, where their
docstrings say so.
"""

from dsa.reference.cache.compressed_kv import compress_kv, write_compressed_kv
from dsa.reference.cache.indexer_cache import read_indexer_cache, write_indexer_cache
from dsa.reference.cache.kv_cache import make_v4_cache, read_kv_cache, write_kv_cache
from dsa.reference.cache.mla_cache_inputs import write_mla_cache
from dsa.reference.cache.slot_mapping import slot_mapping
from dsa.reference.elementwise.hyper_collapse_norm_cast import (
    hyper_collapse_independent_norm_cast_to_fp8,
    hyper_collapse_norm_cast_to_fp8,
)
from dsa.reference.elementwise.hyper_connections import (
    hyper_collapse,
    hyper_collapse_independent,
    hyper_expand,
    hyper_head,
)
from dsa.reference.elementwise.hyper_expand_mix import hyper_expand_mix
from dsa.reference.elementwise.hyper_mix import hyper_mix
from dsa.reference.elementwise.rms_norm import rms_norm
from dsa.reference.elementwise.rms_norm_cast import add_rms_norm_cast_to_fp8, rms_norm_cast_to_fp8
from dsa.reference.elementwise.rms_norm_rotary import rms_norm_rotary
from dsa.reference.elementwise.rotary import apply_rotary
from dsa.reference.gemm.fp4_cast import dequantize_fp4, fp4_block_scales, quantize_fp4, widen_fp4
from dsa.reference.gemm.fp8_cast import (
    ceil_to_ue8m0,
    dequantize_per_block,
    dequantize_per_token,
    per_block_cast_to_fp8,
    per_row_cast_to_fp8,
    per_token_cast_to_fp8,
)
from dsa.reference.gemm.fp8_fp4_gemm_nt import grouped_fp8_fp4_gemm_nt
from dsa.reference.gemm.fp8_gemm_nt import fp8_gemm_nt, grouped_fp8_gemm_nt
from dsa.reference.gemm.grouped_fp8_gemm_swiglu import grouped_fp8_fp4_gemm_swiglu, grouped_fp8_gemm_swiglu
from dsa.reference.gemm.hadamard import hadamard_transform
from dsa.reference.gemm.linear_fp32 import linear_fp32
from dsa.reference.gemm.rotary_cast_to_fp8 import rotary_cast_to_fp8
from dsa.reference.gemm.scatter_cast_to_fp8 import scatter_cast_to_fp8
from dsa.reference.gemm.swiglu_cast_to_fp8 import gate_cast_to_fp8, swiglu_cast_to_fp8
from dsa.reference.indexer.fp8_mqa_logits import fp8_mqa_logits, mqa_logits
from dsa.reference.indexer.fp8_paged_mqa_logits import fp8_paged_mqa_logits, get_paged_mqa_logits_metadata
from dsa.reference.indexer.indexer_inputs import quantize_indexer_queries, write_indexer_keys
from dsa.reference.indexer.indexer_select import indexer_select
from dsa.reference.indexer.paged_indexer_select import paged_indexer_select
from dsa.reference.indexer.topk_indices import topk_indices
from dsa.reference.mla.flash_mla_sparse_fwd import flash_mla_sparse_fwd
from dsa.reference.mla.flash_mla_with_kvcache import flash_mla_with_kvcache
from dsa.reference.mla.merge_attention import merge_attention
from dsa.reference.mla.mha_varlen_fwd import mha_varlen_fwd
from dsa.reference.mla.mla_absorb_queries import mla_absorb_queries
from dsa.reference.mla.mla_metadata import FlashMLASchedMeta, get_mla_metadata
from dsa.reference.mla.mla_values_cast_to_fp8 import mla_values_cast_to_fp8
from dsa.reference.mla.selection_bits import selection_bits
from dsa.reference.mla.sliding_window_attention import sliding_window_attention, window_sparse_attention
from dsa.reference.mla.sliding_window_decode import sliding_window_decode
from dsa.reference.mla.window_attention_cast import window_attention_cast_to_fp8
from dsa.reference.mla.window_indices import window_indices, window_slots
from dsa.reference.moe.combine_experts import combine_experts
from dsa.reference.moe.expert_routing import moe_gate, sort_by_expert
from dsa.reference.moe.route_by_table import route_by_table
from dsa.reference.moe.route_to_experts import route_to_experts
from dsa.reference.training.indexer_topk import indexer_topk
from dsa.reference.training.indexer_warmup_attention import indexer_warmup_attention
from dsa.reference.training.sparse_indexer_loss import sparse_indexer_loss
from dsa.reference.training.sparse_mla_attention import sparse_mla_attention

__all__ = [
    "FlashMLASchedMeta",
    "add_rms_norm_cast_to_fp8",
    "apply_rotary",
    "ceil_to_ue8m0",
    "combine_experts",
    "compress_kv",
    "dequantize_fp4",
    "dequantize_per_block",
    "dequantize_per_token",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "fp4_block_scales",
    "fp8_gemm_nt",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "gate_cast_to_fp8",
    "get_mla_metadata",
    "get_paged_mqa_logits_metadata",
    "grouped_fp8_fp4_gemm_nt",
    "grouped_fp8_fp4_gemm_swiglu",
    "grouped_fp8_gemm_nt",
    "grouped_fp8_gemm_swiglu",
    "hadamard_transform",
    "hyper_collapse",
    "hyper_collapse_independent",
    "hyper_collapse_independent_norm_cast_to_fp8",
    "hyper_collapse_norm_cast_to_fp8",
    "hyper_expand",
    "hyper_expand_mix",
    "hyper_head",
    "hyper_mix",
    "indexer_select",
    "indexer_topk",
    "indexer_warmup_attention",
    "linear_fp32",
    "make_v4_cache",
    "merge_attention",
    "mha_varlen_fwd",
    "mla_absorb_queries",
    "mla_values_cast_to_fp8",
    "moe_gate",
    "mqa_logits",
    "paged_indexer_select",
    "per_block_cast_to_fp8",
    "per_row_cast_to_fp8",
    "per_token_cast_to_fp8",
    "quantize_fp4",
    "quantize_indexer_queries",
    "read_indexer_cache",
    "read_kv_cache",
    "rms_norm",
    "rms_norm_cast_to_fp8",
    "rms_norm_rotary",
    "rotary_cast_to_fp8",
    "route_by_table",
    "route_to_experts",
    "scatter_cast_to_fp8",
    "selection_bits",
    "sliding_window_attention",
    "sliding_window_decode",
    "slot_mapping",
    "sort_by_expert",
    "sparse_indexer_loss",
    "sparse_mla_attention",
    "swiglu_cast_to_fp8",
    "topk_indices",
    "widen_fp4",
    "window_attention_cast_to_fp8",
    "window_indices",
    "window_slots",
    "window_sparse_attention",
    "write_compressed_kv",
    "write_indexer_cache",
    "write_indexer_keys",
    "write_kv_cache",
    "write_mla_cache",
]
