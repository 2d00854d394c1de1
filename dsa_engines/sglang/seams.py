"""The SGLang functions that the plugin replaces, and their hooks.

`SEAMS` lists them per attention backend and op, `OF_LAYERS` for layers of any backend. `CALL_SITES` lists the calls
that reach them; a test compares the list with SGLang's source. `signatures.json` has the parameters of these functions
and of others that the plugin calls, in the tested version.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsa.runtime import backends
from dsa_engines import first_call
from dsa_engines.replacements import check_parameters, find
from dsa_engines.sglang import adapters, experts, hooks, linear, renamed

TESTED = ("0.5.23",)
SIGNATURES: dict[str, list[str]] = json.loads(Path(__file__).with_name("signatures.json").read_text())["functions"]

ATTENTION = "sglang.srt.layers.attention"
UTILS = f"{ATTENTION}.dsa.utils"
TOPK = f"{ATTENTION}.dsa.dsa_topk_backend"
BACKEND = f"{ATTENTION}.dsa_backend"
CLASS = f"{BACKEND}:DeepseekSparseAttnBackend"
PLAN_CLASS = f"{BACKEND}:DSAFlashMLAMetadata"
V4_OPS = "sglang.kernels.ops.attention.dsv4"
V4_PLAN, V4_TOPK = f"{V4_OPS}.attn", f"{V4_OPS}.topk"
FLASH_MLA = "sglang.kernels.ops.attention.flash_mla_interface"
V4_MODEL = "sglang.srt.models.deepseek_v4"
FP8 = "sglang.srt.layers.quantization.fp8"
MARLIN = "sglang.srt.layers.quantization.mxfp4_marlin_moe:Mxfp4MarlinMoEMethod"
FLASHINFER = "sglang.srt.layers.quantization.mxfp4_flashinfer_cutlass_moe:Mxfp4FlashinferCutlassMoEMethod"
UP_FIRST = f"{FLASHINFER}.load_up_proj_weight_first"  # a property: whether up projections are loaded before gates
RESULT = "sglang.srt.layers.moe.token_dispatcher.standard:StandardCombineInput"
ENVIRON = "sglang.srt.environ:envs"
EXECUTION = "sglang.srt.runtime_context:get_exec"
SCHEDULE = "sglang.srt.runtime_context:get_schedule"
MODEL = "sglang.srt.runtime_context:process_model_config"
LOADING = "sglang.srt.runtime_context:get_model"
# --load-format: other formats copy weights into layers after `process_weights_after_loading`.
LOADED_BEFORE = ("auto", "safetensors", "dummy")
HOOK_REGISTRY = "sglang.srt.plugins.hook_registry:HookRegistry"
HOOK_TYPE = "sglang.srt.plugins.hook_registry:HookType"


def _is_fused() -> bool:
    """Return SGLang's setting: whether top-k is fused with the mapping of positions to cache slots or rows."""
    return _environ().SGLANG_DSA_FUSE_TOPK.get()


def is_deterministic() -> bool:
    """Return whether results must not depend on the batch (`--enable-deterministic-inference`)."""
    return find(EXECUTION).value().deterministic.enable_deterministic_inference


@functools.cache
def _most_tokens() -> int:
    """Return the largest number of tokens per batch."""
    schedule = find(SCHEDULE).value()
    chunk = schedule.chunked_prefill_size
    return chunk if chunk and chunk > 0 else schedule.max_prefill_tokens


def keeps_fp4() -> bool:
    """Return whether dsa serves the FP4 experts of the process's model, which must be a DeepSeek-V4."""
    return (
        backends.why_no_kernels() is None
        and backends.backend() != "reference"
        and not is_deterministic()
        and find(MODEL).value().hf_config.model_type == "deepseek_v4"
        and find(LOADING).value().load_format in LOADED_BEFORE
    )


@functools.cache
def _environ() -> Any:
    return find(ENVIRON).value


def _compute_flashmla_metadata() -> Callable[..., Any]:
    return hooks.compute_flashmla_metadata(find(PLAN_CLASS).value)


# {op: {SGLang function: function that makes its hook}}, for the attention backends "dsa" (V32) and "dsv4" (V4).
Makers = dict[str, Callable[[], Callable[..., Any]]]
V32: dict[str, Makers] = {
    "scores": {
        f"{UTILS}:resolve_fp8_mqa_logits_fn": lambda: hooks.resolver(adapters.fp8_mqa_logits),
        f"{UTILS}:resolve_fp8_paged_mqa_logits_fn": lambda: hooks.resolver(adapters.fp8_paged_mqa_logits),
        f"{UTILS}:resolve_paged_mqa_logits_metadata_fn": lambda: hooks.resolver(adapters.get_paged_mqa_logits_metadata),
        f"{CLASS}._build_paged_mqa_schedule_2d_ctx_lens": lambda: hooks.paged_mqa_schedule_2d_ctx_lens,
    },
    "topk": {f"{TOPK}:DSATopKBackend.topk_transform": lambda: hooks.topk_transform(_is_fused)},
    "attention": {
        f"{CLASS}._forward_flashmla_sparse": lambda: hooks.forward_flashmla_sparse,
        f"{CLASS}._forward_flashmla_kv": lambda: hooks.forward_flashmla_kv,
        f"{CLASS}._compute_flashmla_metadata": _compute_flashmla_metadata,
    },
}
V4: dict[str, Makers] = {
    "scores": {
        "deep_gemm:fp8_mqa_logits": lambda: hooks.fp8_mqa_logits,
        "deep_gemm:fp8_paged_mqa_logits": lambda: hooks.fp8_paged_mqa_logits,
        "deep_gemm:get_paged_mqa_logits_metadata": lambda: hooks.get_paged_mqa_logits_metadata,
        f"{V4_PLAN}:get_paged_mqa_logits_metadata": lambda: hooks.sglangs_paged_mqa_logits_metadata,
    },
    "topk": {
        f"{V4_TOPK}:topk_transform_paged": lambda: hooks.topk_transform_paged,
        f"{V4_TOPK}:topk_transform_paged_v2": lambda: hooks.topk_transform_paged_v2,
    },
    "attention": {
        f"{FLASH_MLA}:flash_mla_with_kvcache": lambda: hooks.flash_mla_with_kvcache(is_deterministic),
        f"{FLASH_MLA}:flash_mla_sparse_fwd": lambda: hooks.flash_mla_sparse_fwd(is_deterministic),
        f"{V4_MODEL}:MqaAttentionBase._kernel_num_heads": lambda: hooks.kernel_num_heads,
    },
}
# For both attention backends.
LAYERS: dict[str, Makers] = {
    "experts": {
        f"{FP8}:Fp8MoEMethod.apply": lambda: experts.apply(experts.fp8_weights, find(RESULT).value, _most_tokens),
    },
    "linear": {f"{FP8}:Fp8LinearMethod.apply": lambda: linear.apply(_most_tokens)},
}
# Replaced when the plugin is loaded, because SGLang converts weights before it creates an attention backend.
FP4: dict[str, Makers] = {
    "experts": {
        f"{MARLIN}.process_weights_after_loading": lambda: experts.fp4_setup(keeps_fp4, _most_tokens, False),
        f"{FLASHINFER}.process_weights_after_loading": lambda: experts.fp4_setup(keeps_fp4, _most_tokens, True),
        f"{MARLIN}.apply": lambda: experts.apply(experts.fp4_weights, find(RESULT).value, _most_tokens),
        f"{FLASHINFER}.apply": lambda: experts.apply(experts.fp4_weights, find(RESULT).value, _most_tokens),
    }
}
SEAMS = {"dsa": V32, "dsv4": V4}  # per attention backend
OF_LAYERS = {"layers": LAYERS, "fp4": FP4}
# On untested SGLang versions, only these functions are replaced, after a comparison at the first call.
COMPARED_AT_FIRST = frozenset(
    {
        f"{CLASS}._forward_flashmla_sparse",
        f"{CLASS}._forward_flashmla_kv",
        f"{FP8}:Fp8MoEMethod.apply",
        f"{FP8}:Fp8LinearMethod.apply",
    }
)
# {(family, op): what the op's hooks need in addition to the replaced functions}
NEEDED = {
    ("dsa", "topk"): (ENVIRON,),
    ("dsa", "attention"): (PLAN_CLASS,),
    ("dsv4", "attention"): (EXECUTION,),
    ("layers", "experts"): (RESULT, SCHEDULE, EXECUTION),
    ("layers", "linear"): (SCHEDULE, EXECUTION),
    ("fp4", "experts"): (RESULT, SCHEDULE, EXECUTION, MODEL, LOADING, UP_FIRST),
}

CONTEXT_LENS = "_build_paged_mqa_schedule_2d_ctx_lens"
FROM_PRECOMPUTED = "init_forward_metadata_replay_cuda_graph_from_precomputed"
INDEXER = f"{ATTENTION}.dsa.dsa_indexer"
METADATA = f"{ATTENTION}.dsa.dsa_indexer_metadata"
V4_INDEXER = f"{ATTENTION}.dsv4.indexer"
V4_METADATA = f"{ATTENTION}.dsv4.metadata"
V4_BACKEND = f"{ATTENTION}.deepseek_v4_backend"
# (module, function in it, name that the function reads): the calls that reach the replaced functions.
CALL_SITES = (
    (INDEXER, "Indexer._get_topk_ragged", "resolve_fp8_mqa_logits_fn"),
    (INDEXER, "Indexer._get_topk_paged", "resolve_fp8_paged_mqa_logits_fn"),
    (INDEXER, "Indexer._get_topk_paged", "resolve_paged_mqa_logits_metadata_fn"),
    (BACKEND, "DeepseekSparseAttnBackend.init_forward_metadata", "resolve_paged_mqa_logits_metadata_fn"),
    (BACKEND, "DeepseekSparseAttnBackend._build_forward_metadata_cuda_graph", "resolve_paged_mqa_logits_metadata_fn"),
    (BACKEND, "DeepseekSparseAttnBackend._refresh_paged_mqa_schedule_metadata", "resolve_paged_mqa_logits_metadata_fn"),
    (BACKEND, "DeepseekSparseAttnBackend.init_forward_metadata", f"self.{CONTEXT_LENS}"),
    (BACKEND, "DeepseekSparseAttnBackend._build_forward_metadata_cuda_graph", f"self.{CONTEXT_LENS}"),
    (BACKEND, "DeepseekSparseAttnBackend._apply_cuda_graph_metadata", f"self.{CONTEXT_LENS}"),
    (BACKEND, f"DeepseekSparseAttnBackend.{FROM_PRECOMPUTED}", f"self.{CONTEXT_LENS}"),
    (METADATA, "DSAIndexerMetadata.topk_transform", "self.topk_backend.topk_transform"),
    (INDEXER, "Indexer._get_topk_ragged", "metadata.topk_transform"),
    (INDEXER, "Indexer._get_topk_paged", "metadata.topk_transform"),
    (INDEXER, "Indexer._forward_cuda_k_only", "metadata.topk_transform"),
    (BACKEND, "DeepseekSparseAttnBackend.forward_extend", "self._forward_flashmla_sparse"),
    (BACKEND, "DeepseekSparseAttnBackend.forward_extend", "self._forward_flashmla_kv"),
    (BACKEND, "DeepseekSparseAttnBackend.forward_decode", "self._forward_flashmla_sparse"),
    (BACKEND, "DeepseekSparseAttnBackend.forward_decode", "self._forward_flashmla_kv"),
    (BACKEND, "DeepseekSparseAttnBackend.init_forward_metadata", "self._compute_flashmla_metadata"),
    (BACKEND, "DeepseekSparseAttnBackend.init_cuda_graph_state", "self._compute_flashmla_metadata"),
    (BACKEND, "DeepseekSparseAttnBackend._build_forward_metadata_cuda_graph", "self._compute_flashmla_metadata"),
    (BACKEND, "DeepseekSparseAttnBackend._apply_cuda_graph_metadata", "self._compute_flashmla_metadata"),
    (V4_INDEXER, "C4IndexerBackendMixin._nonpaged_mqa_logits", "deep_gemm.fp8_mqa_logits"),
    (V4_INDEXER, "C4IndexerBackendMixin.forward_c4_indexer", "deep_gemm.fp8_paged_mqa_logits"),
    (V4_INDEXER, "C4IndexerBackendMixin.forward_c4_indexer", "topk_transform_paged"),
    (V4_INDEXER, "C4IndexerBackendMixin.forward_c4_indexer", "topk_transform_paged_v2"),
    (V4_METADATA, "PagedIndexerMetadata.__post_init__", "deep_gemm.get_paged_mqa_logits_metadata"),
    (V4_METADATA, "PagedIndexerMetadata.__post_init__", f"{V4_OPS}.get_paged_mqa_logits_metadata"),
    (V4_BACKEND, "DeepseekV4AttnBackend.__init__", "flash_mla_interface.flash_mla_with_kvcache"),
    (V4_BACKEND, "DeepseekV4AttnBackend._forward_attention", "self._flash_mla_with_kvcache"),
    (V4_BACKEND, "DeepseekV4AttnBackend._forward_prefill_sparse", "flash_mla_sparse_fwd"),
    (V4_MODEL, "MQALayer.forward", "self._kernel_num_heads"),
    ("sglang.srt.layers.moe.fused_moe_triton.layer", "FusedMoE.run_moe_core", "self.quant_method.apply"),
    ("sglang.srt.layers.linear", "ReplicatedLinear.forward", "self.quant_method.apply"),
    ("sglang.srt.layers.linear", "ColumnParallelLinear.forward", "self.quant_method.apply"),
    ("sglang.srt.layers.linear", "RowParallelLinear.forward", "self.quant_method.apply"),
    (
        "sglang.srt.model_loader.loader",
        "DefaultModelLoader.postprocess_weights",
        "quant_method.process_weights_after_loading",
    ),
)


def check(family: str, op: str) -> None:
    """Raise NotFound if a function that an op of SEAMS or OF_LAYERS needs is missing or has other parameters."""
    replaced, needed = (SEAMS | OF_LAYERS)[family][op], NEEDED.get((family, op), ())
    for path in (*replaced, *needed, f"{HOOK_REGISTRY}.register", f"{HOOK_REGISTRY}.apply_hooks", HOOK_TYPE):
        if path in SIGNATURES:
            check_parameters(*renamed.installed(path, SIGNATURES[path]))
        else:
            find(path)


def hooks_of(family: str, ops: frozenset[str], is_known: bool) -> dict[str, Callable[..., Any]]:
    """Return {function: hook} for these ops. is_known: whether this SGLang version was tested. If not, return only the
    hooks in COMPARED_AT_FIRST, which are compared with SGLang's functions at their first call."""
    makers = (SEAMS | OF_LAYERS)[family]
    found = {path: (op, make) for op in sorted(ops) if op in makers for path, make in makers[op].items()}
    if is_known:
        return {path: make() for path, (_, make) in found.items()}
    return {path: _compared(make(), op) for path, (op, make) in found.items() if path in COMPARED_AT_FIRST}


def _compared(hook: Callable[..., Any], op: str) -> Callable[..., Any]:
    chosen: list[Callable[..., Any]] = []

    @functools.wraps(hook)
    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not chosen:
            chosen.append(first_call.compared(original, functools.partial(functools.partial, hook), op, "sglang"))
        return chosen[0](*args, **kwargs)

    return around
