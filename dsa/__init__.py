"""DeepSeek Sparse Attention for NVIDIA Hopper: the public ops and the functions that choose their backend.

Importing this package imports torch, but not CuTe DSL, and does not initialise CUDA.
"""

from dsa.ops.cache.compressed_kv import compress_kv, write_compressed_kv
from dsa.ops.cache.indexer_cache import read_indexer_cache, write_indexer_cache
from dsa.ops.cache.kv_cache import make_v4_cache, read_kv_cache, write_kv_cache
from dsa.ops.cache.mla_cache_inputs import write_mla_cache
from dsa.ops.cache.slot_mapping import slot_mapping
from dsa.ops.elementwise.hyper_collapse_norm_cast import (
    hyper_collapse_independent_norm_cast_to_fp8,
    hyper_collapse_norm_cast_to_fp8,
)
from dsa.ops.elementwise.hyper_connections import hyper_collapse, hyper_collapse_independent, hyper_expand, hyper_head
from dsa.ops.elementwise.hyper_expand_mix import hyper_expand_mix
from dsa.ops.elementwise.hyper_mix import hyper_mix
from dsa.ops.elementwise.rms_norm import rms_norm
from dsa.ops.elementwise.rms_norm_cast import add_rms_norm_cast_to_fp8, rms_norm_cast_to_fp8
from dsa.ops.elementwise.rms_norm_rotary import rms_norm_rotary
from dsa.ops.elementwise.rotary import apply_rotary
from dsa.ops.gemm.fp8_fp4_gemm_nt import fp4_block_scales, grouped_fp8_fp4_gemm_nt, widen_fp4
from dsa.ops.gemm.fp8_gemm_nt import dequantize_per_block, fp8_gemm_nt, grouped_fp8_gemm_nt, per_block_cast_to_fp8
from dsa.ops.gemm.grouped_fp8_gemm_swiglu import grouped_fp8_fp4_gemm_swiglu, grouped_fp8_gemm_swiglu
from dsa.ops.gemm.linear_fp32 import linear_fp32
from dsa.ops.gemm.per_token_cast_to_fp8 import per_token_cast_to_fp8
from dsa.ops.gemm.rotary_cast_to_fp8 import rotary_cast_to_fp8
from dsa.ops.gemm.scatter_cast_to_fp8 import scatter_cast_to_fp8
from dsa.ops.gemm.swiglu_cast_to_fp8 import gate_cast_to_fp8, swiglu_cast_to_fp8
from dsa.ops.indexer.fp8_mqa_logits import fp8_mqa_logits, mqa_logits
from dsa.ops.indexer.fp8_paged_mqa_logits import fp8_paged_mqa_logits, get_paged_mqa_logits_metadata
from dsa.ops.indexer.indexer_inputs import quantize_indexer_queries, write_indexer_keys
from dsa.ops.indexer.indexer_select import indexer_select
from dsa.ops.indexer.paged_indexer_select import paged_indexer_select
from dsa.ops.indexer.topk_indices import topk_indices
from dsa.ops.mla.flash_mla_sparse_fwd import flash_mla_sparse_fwd
from dsa.ops.mla.flash_mla_with_kvcache import FlashMLASchedMeta, flash_mla_with_kvcache, get_mla_metadata
from dsa.ops.mla.merge_attention import merge_attention
from dsa.ops.mla.mha_varlen_fwd import mha_varlen_fwd
from dsa.ops.mla.mla_absorb_queries import mla_absorb_queries
from dsa.ops.mla.mla_values_cast_to_fp8 import mla_values_cast_to_fp8
from dsa.ops.mla.selection_bits import selection_bits
from dsa.ops.mla.sliding_window_attention import (
    sliding_window_attention,
    sliding_window_decode,
    window_sparse_attention,
)
from dsa.ops.mla.window_attention_cast import window_attention_cast_to_fp8
from dsa.ops.mla.window_indices import window_indices, window_slots
from dsa.ops.moe.combine_experts import combine_experts
from dsa.ops.moe.expert_routing import moe_gate, sort_by_expert
from dsa.ops.moe.route_by_table import route_by_table
from dsa.ops.moe.route_to_experts import route_to_experts
from dsa.ops.training.indexer_topk import indexer_topk
from dsa.ops.training.indexer_warmup_attention import indexer_warmup_attention
from dsa.ops.training.sparse_indexer_loss import sparse_indexer_loss
from dsa.ops.training.sparse_mla_attention import sparse_mla_attention
from dsa.runtime.backends import backend, num_sms, use_backend

__version__ = "0.1.0"

__all__ = [
    "FlashMLASchedMeta",
    "add_rms_norm_cast_to_fp8",
    "apply_rotary",
    "backend",
    "combine_experts",
    "compress_kv",
    "dequantize_per_block",
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
    "num_sms",
    "paged_indexer_select",
    "per_block_cast_to_fp8",
    "per_token_cast_to_fp8",
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
    "use_backend",
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
