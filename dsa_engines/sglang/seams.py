"""Which of SGLang's functions are replaced, and by what.

`SEAMS` has them for each of SGLang's two attention backends of these models, by op. `CALL_SITES` has the calls that
they are for; a test compares it with SGLang's source. `signatures.json` has the parameters of every function that is
replaced, as they are in the version that was tested.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsa_engines.replacements import check_parameters, find
from dsa_engines.sglang import adapters, hooks, renamed

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
ENVIRON = "sglang.srt.environ:envs"
EXECUTION = "sglang.srt.runtime_context:get_exec"
HOOK_REGISTRY = "sglang.srt.plugins.hook_registry:HookRegistry"
HOOK_TYPE = "sglang.srt.plugins.hook_registry:HookType"


def _is_fused() -> bool:
    """SGLang's own switch between selections as cache slots and as positions."""
    return _environ().SGLANG_DSA_FUSE_TOPK.get()


def _is_deterministic() -> bool:
    """Whether SGLang is to be (`--enable-deterministic-inference`)."""
    return find(EXECUTION).value().deterministic.enable_deterministic_inference


@functools.cache
def _environ() -> Any:
    return find(ENVIRON).value


def _compute_flashmla_metadata() -> Callable[..., Any]:
    return hooks.compute_flashmla_metadata(find(PLAN_CLASS).value)


# backend -> op -> function -> what makes the hook.
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
        f"{FLASH_MLA}:flash_mla_with_kvcache": lambda: hooks.flash_mla_with_kvcache(_is_deterministic),
        f"{FLASH_MLA}:flash_mla_sparse_fwd": lambda: hooks.flash_mla_sparse_fwd(_is_deterministic),
        f"{V4_MODEL}:MqaAttentionBase._kernel_num_heads": lambda: hooks.kernel_num_heads,
    },
}
SEAMS = {"dsa": V32, "dsv4": V4}
NEEDED = {"dsa": (PLAN_CLASS,), "dsv4": ()}  # what hooks call besides

CONTEXT_LENS = "_build_paged_mqa_schedule_2d_ctx_lens"
FROM_PRECOMPUTED = "init_forward_metadata_replay_cuda_graph_from_precomputed"
INDEXER = f"{ATTENTION}.dsa.dsa_indexer"
METADATA = f"{ATTENTION}.dsa.dsa_indexer_metadata"
V4_INDEXER = f"{ATTENTION}.dsv4.indexer"
V4_METADATA = f"{ATTENTION}.dsv4.metadata"
V4_BACKEND = f"{ATTENTION}.deepseek_v4_backend"
# (module, function there, what it reads): the calls that the replacements are for.
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
)


def check(family: str) -> None:
    """Raises NotFound where SGLang lacks something that any of a backend's ops needs, or has it in another form."""
    replaced = (path for makers in SEAMS[family].values() for path in makers)
    for path in (*replaced, *NEEDED[family], f"{HOOK_REGISTRY}.register", f"{HOOK_REGISTRY}.apply_hooks"):
        check_parameters(*renamed.installed(path, SIGNATURES[path]))
    for path in (ENVIRON, EXECUTION, HOOK_TYPE):
        find(path)


def served(family: str, ops: frozenset[str]) -> frozenset[str]:
    """The ops of these that are replaced for a backend.

    DeepSeek-V4's selection is only replaced together with its scores: where a query has no more keys than are selected,
    SGLang leaves the scores unwritten, and its own selection does not read them.
    """
    return ops - {"topk"} if family == "dsv4" and "scores" not in ops else ops


def hooks_of(family: str, ops: frozenset[str]) -> dict[str, Callable[..., Any]]:
    """function -> its hook, of these ops of a backend."""
    return {path: make() for op in sorted(ops) for path, make in SEAMS[family][op].items()}
