"""PyTorch references of every operation: plain fp32, no dispatch, to be read beside the papers."""

from .compressed_kv import compress_kv, write_compressed_kv
from .expert_routing import moe_gate, sort_by_expert
from .expert_sum import combine_experts
from .fp8_cast import (
    ceil_to_ue8m0,
    dequantize_per_block,
    dequantize_per_token,
    per_block_cast_to_fp8,
    per_row_cast_to_fp8,
    per_token_cast_to_fp8,
)
from .fp8_gemm import fp8_gemm_nt, grouped_fp8_gemm_nt
from .hadamard import hadamard_transform
from .hyper_connections import hyper_collapse, hyper_expand
from .indexer_cache import read_indexer_cache, write_indexer_cache
from .indexer_inputs import quantize_indexer_queries, write_indexer_keys
from .indexer_logits import fp8_mqa_logits, mqa_logits
from .indexer_training import indexer_topk, indexer_warmup_attention, sparse_indexer_loss, sparse_mla_attention
from .kv_cache import make_v4_cache, read_kv_cache, write_kv_cache
from .mla_cache_inputs import write_mla_cache
from .mla_decode import flash_mla_with_kvcache
from .mla_metadata import FlashMLASchedMeta, get_mla_metadata
from .mla_prefill import flash_mla_sparse_fwd
from .norm import rms_norm
from .paged_indexer_logits import fp8_paged_mqa_logits, get_paged_mqa_logits_metadata
from .rotary import apply_rotary
from .sliding_window import merge_attention, sliding_window_attention, window_sparse_attention
from .swiglu_cast import swiglu_cast_to_fp8
from .topk import topk_indices
from .window_decode import sliding_window_decode
from .window_selection import window_indices, window_slots

__all__ = [
    "FlashMLASchedMeta",
    "apply_rotary",
    "ceil_to_ue8m0",
    "combine_experts",
    "compress_kv",
    "dequantize_per_block",
    "dequantize_per_token",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "fp8_gemm_nt",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "get_mla_metadata",
    "get_paged_mqa_logits_metadata",
    "grouped_fp8_gemm_nt",
    "hadamard_transform",
    "hyper_collapse",
    "hyper_expand",
    "indexer_topk",
    "indexer_warmup_attention",
    "make_v4_cache",
    "merge_attention",
    "moe_gate",
    "mqa_logits",
    "per_block_cast_to_fp8",
    "per_row_cast_to_fp8",
    "per_token_cast_to_fp8",
    "quantize_indexer_queries",
    "read_indexer_cache",
    "read_kv_cache",
    "rms_norm",
    "sliding_window_attention",
    "sliding_window_decode",
    "sort_by_expert",
    "sparse_indexer_loss",
    "sparse_mla_attention",
    "swiglu_cast_to_fp8",
    "topk_indices",
    "window_indices",
    "window_slots",
    "window_sparse_attention",
    "write_compressed_kv",
    "write_indexer_cache",
    "write_indexer_keys",
    "write_kv_cache",
    "write_mla_cache",
]
