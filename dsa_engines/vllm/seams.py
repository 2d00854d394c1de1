"""The vLLM attributes that the plugin replaces, and their replacements.

All of them are module globals or class attributes that vLLM looks up again at each use. `CALL_SITES` lists these uses;
a test compares the list with vLLM's source. `signatures.json` has the parameters of all functions that the plugin
replaces, overrides or calls, in the tested version.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsa.compat import deep_gemm
from dsa_engines import first_call
from dsa_engines.replacements import NotFound, check_parameters, find
from dsa_engines.vllm import adapters, experts, linear, prefill, queries, routing, select
from dsa_engines.vllm.models import Calls

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

FP8 = "vllm.model_executor.layers.quantization.fp8"
MXFP4 = "vllm.model_executor.layers.quantization.mxfp4"
ROUTED_EXPERTS = "vllm.model_executor.layers.fused_moe.routed_experts"
RUNNER = "vllm.model_executor.layers.fused_moe.runner.moe_runner"
GATE = "vllm.model_executor.layers.fused_moe.router.gate_linear"
DEEPSEEK_V2 = "vllm.model_executor.models.deepseek_v2"
BIAS_ROUTER = "vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router"
BASE_ROUTER = "vllm.model_executor.layers.fused_moe.router.base_router"
GROUPED_ROUTER = "vllm.model_executor.layers.fused_moe.router.grouped_topk_router"
LINEAR = "vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel"
V32_LAYER = "vllm.models.deepseek_v32.attention"
MLA = "vllm.model_executor.layers.attention.mla_attention"
SPARSE_MLA = "vllm.model_executor.layers.attention.sparse_mla_attention"

# {part: {attribute: function that makes the replacement from the current value and the sizes of the model's calls}}
Maker = Callable[[Any, Calls], Any]
REPLACED: dict[str, dict[str, Maker]] = {
    "scores": {
        f"{DEEP_GEMM}:_fp8_fp4_mqa_logits_impl": lambda _, calls: deep_gemm.fp8_fp4_mqa_logits,
        f"{DEEP_GEMM}:_fp8_fp4_paged_mqa_logits_impl": lambda _, calls: deep_gemm.fp8_fp4_paged_mqa_logits,
        f"{DEEP_GEMM}:_get_paged_mqa_logits_metadata_impl": lambda _, calls: deep_gemm.get_paged_mqa_logits_metadata,
        f"{DEEP_GEMM}:_paged_mqa_logits_schedule_slots": lambda _, calls: adapters.schedule_slots,
        f"{PLAN}:native_next_n_supported": lambda _, calls: adapters.native_next_n_supported,
        f"{OPS}:cp_gather_indexer_k_quant_cache": lambda _, calls: adapters.gather_keys,
    },
    "topk": {
        f"{OPS}:top_k_per_row_prefill": lambda _, calls: adapters.topk_prefill,
        f"{TOPK}:SparseIndexerTopk.forward": lambda found, calls: adapters.topk_forward(found),
    },
    "attention": {
        f"{V4}:flash_mla_with_kvcache": lambda _, calls: adapters.v4_attention,
        f"{V4}:flash_mla_sparse_fwd": lambda _, calls: adapters.v4_prefill,
        f"{V4}:DeepseekV4FlashMLAAttention.get_padded_num_q_heads": lambda _, calls: classmethod(
            lambda cls, num_heads: adapters.v4_heads(num_heads)
        ),
    },
    # After `scores` and `topk`: for short contexts, `select` calls their functions.
    "select": {
        f"{DEEP_GEMM}:_fp8_fp4_mqa_logits_impl": lambda found, calls: select.mqa_logits(found),
        f"{OPS}:top_k_per_row_prefill": lambda found, calls: select.topk_prefill(found),
    },
    "prefill": {
        f"{SPARSE_MLA}:SparseMLACommonImpl.forward_mha": lambda found, calls: prefill.forward_mha(found),
        f"{MLA}:MLAAttention._use_sparse_mha": lambda found, calls: prefill.use_sparse_mha(found),
    },
    "queries": {f"{V32_LAYER}:fused_q": lambda found, calls: queries.fused_q(found)},
    "routing": {
        f"{RUNNER}:MoERunner._forward_impl": lambda found, calls: routing.forward_impl(found),
        f"{GATE}:GateLinear.forward": lambda found, calls: routing.gate_forward(found),
        f"{GROUPED_ROUTER}:GroupedTopKRouter._compute_routing": lambda found, calls: routing.compute_routing(found),
        f"{BIAS_ROUTER}:FusedTopKBiasRouter._compute_routing": lambda found, calls: routing.compute_routing(found),
    },
    "experts": {
        f"{FP8}:Fp8MoEMethod.apply": lambda found, calls: experts.apply(found, experts.fp8_weights, calls.tokens),
        f"{MXFP4}:Mxfp4MoEMethod._setup_kernel": lambda found, calls: experts.fp4_setup(found, calls.tokens),
        f"{MXFP4}:Mxfp4MoEMethod.apply": lambda found, calls: experts.apply(found, experts.fp4_weights, calls.tokens),
    },
    "linear": {
        f"{LINEAR}:Fp8BlockScaledMMLinearKernel.apply_weights": lambda found, calls: linear.apply_weights(
            found, calls.tokens
        ),
    },
}
# On untested vLLM versions: compared at the first call (COMPARED_AT_FIRST), or not replaced (NOT_COMPARED).
COMPARED_AT_FIRST = frozenset(
    {
        f"{SPARSE_MLA}:SparseMLACommonImpl.forward_mha",
        f"{FP8}:Fp8MoEMethod.apply",
        f"{LINEAR}:Fp8BlockScaledMMLinearKernel.apply_weights",
    }
)
NOT_COMPARED = frozenset(
    {f"{MXFP4}:Mxfp4MoEMethod._setup_kernel", f"{MXFP4}:Mxfp4MoEMethod.apply", *REPLACED["routing"]}
)
BACKEND_CLASS = f"{FLASHMLA_SPARSE}:FlashMLASparseBackend"
BUILDER_CLASS = f"{FLASHMLA_SPARSE}:FlashMLASparseMetadataBuilder"
IMPL_CLASS = f"{FLASHMLA_SPARSE}:FlashMLASparseImpl"
V4_CLASS = f"{V4}:DeepseekV4FlashMLAAttention"
# {part: functions that are not replaced, but must also have the parameters of the tested version}
NEEDED: dict[str, tuple[str, ...]] = {
    "scores": (
        f"{DEEP_GEMM}:_lazy_init",
        f"{DEEP_GEMM}:fp8_fp4_mqa_logits",
        f"{DEEP_GEMM}:fp8_fp4_paged_mqa_logits",
        f"{DEEP_GEMM}:get_paged_mqa_logits_metadata",
        f"{INDEXER}:sparse_attn_indexer",
    ),
    "topk": (f"{INDEXER}:sparse_attn_indexer", f"{TOPK}:SparseIndexerTopk.__init__", f"{TOPK}:get_indexer_topk"),
    "attention": (
        *(f"{BACKEND_CLASS}.{name}" for name in ("get_builder_cls", "get_impl_cls", "get_name")),
        f"{BUILDER_CLASS}.__init__",
        *(f"{IMPL_CLASS}.{name}" for name in ("_bf16_flash_mla_kernel", "_fp8_flash_mla_kernel", "forward_mqa")),
        f"{V4_CLASS}.forward_mqa",
        f"{REGISTRY}:register_backend",
    ),
    "select": (f"{DEEP_GEMM}:_lazy_init", f"{INDEXER}:sparse_attn_indexer"),
    "prefill": (f"{OPS}:cp_gather_and_upconvert_fp8_kv_cache",),
    "queries": (),
    "routing": (f"{BASE_ROUTER}:BaseRouter._select_experts",),
    "experts": (f"{MXFP4}:Mxfp4MoEMethod._build_moe_kernel",),
    "linear": (),
}
# (module, function in it, name that the function reads): where vLLM reads what the plugin replaces or overrides.
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
    (MLA, "MLAAttention.forward_impl", "self._use_sparse_mha"),
    (MLA, "MLAAttention.forward_impl", "self.impl.forward_mha"),
    (V32_LAYER, "DeepseekV32Attention._should_prepare_mqa_query", "self._use_sparse_mha"),
    (V32_LAYER, "DeepseekV32Attention._sparse_indexer_and_attn", "self._use_sparse_mha"),
    (V32_LAYER, "DeepseekV32Attention.forward", "fused_q"),
    (RUNNER, "_moe_forward", "layer._forward_impl"),
    (DEEPSEEK_V2, "DeepseekV2MoE.__init__", "GateLinear"),
    (RUNNER, "MoERunner._forward_impl", "self.gate"),
    (RUNNER, "MoERunner._apply_quant_method", "self.router.select_experts"),
    (BASE_ROUTER, "BaseRouter._select_experts", "self._compute_routing"),
    (ROUTED_EXPERTS, "RoutedExperts.forward_modular", "self.quant_method.apply"),
    (MXFP4, "Mxfp4MoEMethod.process_weights_after_loading", "self._setup_kernel"),
    (FP8, "Fp8LinearMethod.apply", "self.fp8_linear.apply_weights"),
)


def check(part: str) -> None:
    """Raise NotFound if an attribute that a part needs is missing or differs from the tested version."""
    for path in REPLACED[part]:
        find(path)
    for path in (*REPLACED[part], *NEEDED[part]):
        if path in SIGNATURES:  # the others are variables that vLLM sets to functions later
            check_parameters(path, SIGNATURES[path])
    if part == "attention":
        enum = find(f"{REGISTRY}:AttentionBackendEnum").value
        if "FLASHMLA_SPARSE" not in enum.__members__:
            raise NotFound(f"{REGISTRY}:AttentionBackendEnum.FLASHMLA_SPARSE is not there")
        if enum.FLASHMLA_SPARSE.is_overridden():
            raise NotFound(f"FLASHMLA_SPARSE is {enum.FLASHMLA_SPARSE.get_path()} already")
        if not hasattr(find(f"{SELECTOR}:_cached_get_attn_backend").value, "cache_clear"):
            raise NotFound(f"{SELECTOR}:_cached_get_attn_backend is no cached function")


def replacements(parts: frozenset[str], calls: Calls, is_known: bool = True) -> dict[str, Any]:
    """Return {attribute: replacement} for these parts. is_known: whether this vLLM version was tested. If not, leave
    out NOT_COMPARED, and compare COMPARED_AT_FIRST with vLLM's functions at their first call."""
    new: dict[str, Any] = {}
    for part, makers in REPLACED.items():
        for path, make in makers.items() if part in parts else ():
            if not is_known and path in NOT_COMPARED:
                continue
            found = new.get(path, find(path).value)
            new[path] = make(found, calls)
            if not is_known and path in COMPARED_AT_FIRST:
                new[path] = first_call.compared(found, functools.partial(_made, make, calls), part, "vllm")
    return new


def _made(make: Maker, calls: Calls, original: Callable[..., Any]) -> Callable[..., Any]:
    return make(original, calls)
