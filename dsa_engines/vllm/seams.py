"""Which attributes of vLLM are replaced, and by what.

All of them are module globals or class attributes that vLLM reads anew at each call; `CALL_SITES` says where, which a
test compares with vLLM's source. `signatures.json` has the parameters of every function that is replaced, overridden or
relied upon, as they are in the version that was tested.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsa.compat import deep_gemm
from dsa_engines.replacements import NotFound, check_parameters, find
from dsa_engines.vllm import adapters

TESTED = ("0.33.0",)
SIGNATURES: dict[str, list[str]] = json.loads(Path(__file__).with_name("signatures.json").read_text())["functions"]

DEEP_GEMM = "vllm.utils.deep_gemm"
PLAN = "vllm.v1.attention.backends.mla.indexer"
INDEXER = "vllm.model_executor.layers.sparse_attn_indexer"
TOPK = "vllm.model_executor.layers.indexer_topk"
OPS = "vllm._custom_ops"
V4 = "vllm.models.deepseek_v4.nvidia.flashmla"
V4_LAYER = "vllm.models.deepseek_v4.attention"
FLASHMLA_SPARSE = "vllm.v1.attention.backends.mla.flashmla_sparse"
REGISTRY = "vllm.v1.attention.backends.registry"
SELECTOR = "vllm.v1.attention.selector"

# op -> attribute -> what takes its place, given what is there.
Maker = Callable[[Any], Any]
REPLACED: dict[str, dict[str, Maker]] = {
    "scores": {
        f"{DEEP_GEMM}:_fp8_fp4_mqa_logits_impl": lambda _: deep_gemm.fp8_fp4_mqa_logits,
        f"{DEEP_GEMM}:_fp8_fp4_paged_mqa_logits_impl": lambda _: deep_gemm.fp8_fp4_paged_mqa_logits,
        f"{DEEP_GEMM}:_get_paged_mqa_logits_metadata_impl": lambda _: deep_gemm.get_paged_mqa_logits_metadata,
        f"{DEEP_GEMM}:_paged_mqa_logits_schedule_slots": lambda _: adapters.schedule_slots,
        f"{PLAN}:native_next_n_supported": lambda _: adapters.native_next_n_supported,
        f"{OPS}:cp_gather_indexer_k_quant_cache": lambda _: adapters.gather_keys,
    },
    "topk": {
        f"{OPS}:top_k_per_row_prefill": lambda _: adapters.topk_prefill,
        f"{TOPK}:SparseIndexerTopk.forward": adapters.topk_forward,
    },
    "attention": {
        f"{V4}:flash_mla_with_kvcache": lambda _: adapters.v4_attention,
        f"{V4}:flash_mla_sparse_fwd": lambda _: adapters.v4_prefill,
        f"{V4}:DeepseekV4FlashMLAAttention.get_padded_num_q_heads": lambda _: classmethod(
            lambda cls, num_heads: adapters.v4_heads(num_heads)
        ),
    },
}
# (module, function there, what it reads): the calls that the replacements are for.
CALL_SITES = (
    (DEEP_GEMM, "fp8_fp4_mqa_logits", "_fp8_fp4_mqa_logits_impl"),
    (DEEP_GEMM, "fp8_fp4_paged_mqa_logits", "_fp8_fp4_paged_mqa_logits_impl"),
    (DEEP_GEMM, "get_paged_mqa_logits_metadata", "_get_paged_mqa_logits_metadata_impl"),
    (DEEP_GEMM, "get_paged_mqa_logits_metadata", "_paged_mqa_logits_schedule_slots"),
    (PLAN, "_supports_native_decode", "native_next_n_supported"),
    (PLAN, "DeepseekV32IndexerMetadataBuilder.build", "get_paged_mqa_logits_metadata"),
    (PLAN, "DeepseekV32IndexerMetadataBuilder.update_draft_decode_metadata", "get_paged_mqa_logits_metadata"),
    (INDEXER, "sparse_attn_indexer", "fp8_fp4_mqa_logits"),
    (INDEXER, "sparse_attn_indexer", "fp8_fp4_paged_mqa_logits"),
    (INDEXER, "sparse_attn_indexer", "ops.cp_gather_indexer_k_quant_cache"),
    (INDEXER, "sparse_attn_indexer", "ops.top_k_per_row_prefill"),
    (INDEXER, "sparse_attn_indexer", "get_indexer_topk"),
    (TOPK, "get_indexer_topk", "SparseIndexerTopk"),
    (V4_LAYER, "DeepseekV4Attention.__init__", "self.get_padded_num_q_heads"),
    (V4, "DeepseekV4FlashMLAAttention._forward_decode", "flash_mla_with_kvcache"),
    (V4, "DeepseekV4FlashMLAAttention._forward_prefill", "flash_mla_sparse_fwd"),
    (FLASHMLA_SPARSE, "FlashMLASparseImpl._forward_fp8_kv_mixed_batch", "self._fp8_flash_mla_kernel"),
    (FLASHMLA_SPARSE, "FlashMLASparseImpl._forward_fp8_kv_separate_prefill_decode", "self._fp8_flash_mla_kernel"),
    (FLASHMLA_SPARSE, "FlashMLASparseImpl._forward_fp8_kv_separate_prefill_decode", "self._bf16_flash_mla_kernel"),
    (FLASHMLA_SPARSE, "FlashMLASparseImpl._host_backed_fp8_decode", "self._fp8_flash_mla_kernel"),
    (FLASHMLA_SPARSE, "FlashMLASparseImpl._forward_bf16_kv", "self._bf16_flash_mla_kernel"),
    (FLASHMLA_SPARSE, "FlashMLASparseMetadataBuilder.build", "self.fp8_use_mixed_batch"),
)


def check() -> None:
    """Raises NotFound where vLLM lacks something that any of the ops needs, or has it in another form."""
    for path, parameters in SIGNATURES.items():
        check_parameters(path, parameters)
    for makers in REPLACED.values():
        for path in makers:
            find(path)
    enum = find(f"{REGISTRY}:AttentionBackendEnum").value
    if "FLASHMLA_SPARSE" not in enum.__members__:
        raise NotFound(f"{REGISTRY}:AttentionBackendEnum.FLASHMLA_SPARSE is not there")
    if not hasattr(find(f"{SELECTOR}:_cached_get_attn_backend").value, "cache_clear"):
        raise NotFound(f"{SELECTOR}:_cached_get_attn_backend is no cached function")


def replacements(ops: frozenset[str]) -> dict[str, Any]:
    """attribute -> what takes its place, of these ops."""
    makers = {path: make for op in sorted(ops) for path, make in REPLACED[op].items()}
    return {path: make(find(path).value) for path, make in makers.items()}
