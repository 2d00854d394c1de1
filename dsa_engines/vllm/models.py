"""Check whether the plugin serves a vLLM configuration, and return the sizes of the model's calls."""

from dataclasses import dataclass
from typing import Any

import torch

from dsa.kernels.indexer.limits import HEAD_DIMS, HEADS, MAX_K, NEXT_N
from dsa.runtime import backends

# {model_type: query channels in sparse attention}. Other vLLM models share code with these, but dsa has no kernels for
# their caches: DeepSeek-V4.1 has keys of 528 and 288 bytes, and GLM-5.3 has pooled index keys.
QUERY_DIMS = {"deepseek_v32": 576, "glm_moe_dsa": 576, "deepseek_v4": 512}
# vLLM's names for its bf16 caches and, below, for its FP8 caches, which have 656 bytes per key (V4: 584). "auto" means
# FP8 in V4 and bf16 in the other models.
BF16_CACHES = ("bfloat16",)
BACKEND = "FLASHMLA_SPARSE"  # the vLLM attention backend that dsa replaces
FP8_CACHES = ("fp8", "fp8_e4m3", "fp8_ds_mla")
CHOSEN_FOR = (
    "fp8",
    "fp8_ds_mla",
)  # with these caches, vLLM selects BACKEND by default for V3.2 and GLM-5


@dataclass(frozen=True)
class Calls:
    """Sizes that determine which kernels a model needs."""

    index_heads: int
    index_head_dim: int
    topk: int
    heads: int  # query heads on this GPU; with decode context parallelism, those of the whole group
    query_dim: int
    head_dims: tuple[int, int, int]  # nope, rope and value channels per head in multi-head attention; 0 in V4
    fp8_cache: bool  # the cache of attention stores bytes
    next_n: int  # largest number of queries per sequence that decode scores together, or 1
    keys: int  # largest number of index keys per query
    compressed: int  # in V4, largest number of entries of 128 tokens per query; else 0
    window: int  # in V4, tokens in the sliding window; else 0
    tokens: int  # largest number of tokens per step


def selects_keys(config: Any) -> bool:
    """Return whether the model has an indexer; True if the configuration does not say."""
    try:
        return hasattr(config.model_config.hf_text_config, "index_topk")
    except AttributeError:
        return True


def unsupported(config: Any) -> str | None:
    """Return why dsa cannot serve this vLLM configuration on the current GPU; None if it can."""
    if reason := backends.why_no_kernels():
        return reason
    if backends.backend() == "reference":  # it synchronises with the GPU, so CUDA graphs cannot capture it
        return "DSA_BACKEND is reference, and an engine is served by kernels alone"
    model = config.model_config
    hf = model.hf_text_config
    kind = model.hf_config.model_type
    if kind not in QUERY_DIMS:
        return f"model_type is {kind}, and the plugin serves {', '.join(QUERY_DIMS)}"
    if model.dtype != torch.bfloat16:
        return f"the model's dtype is {model.dtype}, and must be torch.bfloat16"
    query_dim = hf.head_dim if kind == "deepseek_v4" else hf.kv_lora_rank + hf.qk_rope_head_dim
    if query_dim != QUERY_DIMS[kind]:
        return f"queries of {kind} have {query_dim} channels, and must have {QUERY_DIMS[kind]}"
    for name, value, accepted in (
        ("index_n_heads", hf.index_n_heads, HEADS),
        ("index_head_dim", hf.index_head_dim, HEAD_DIMS),
    ):
        if value not in accepted:
            return f"{name} is {value}, and must be one of {', '.join(map(str, accepted))}"
    if hf.index_topk > MAX_K:
        return f"index_topk is {hf.index_topk}, and can be at most {MAX_K}"
    index_cache = config.attention_config.resolve_indexer_kv_dtype("fp8")
    if index_cache != "fp8":
        return f"the cache of index keys is {index_cache}, and must be fp8"
    cache = config.cache_config.cache_dtype
    accepted = ("auto", *FP8_CACHES) if kind == "deepseek_v4" else ("auto", *BF16_CACHES, *FP8_CACHES)
    if cache not in accepted:
        return f"the cache of keys is {cache}, and must be one of {', '.join(accepted)}"
    return None


def other_attention(config: Any) -> str | None:
    """Return why attention of this supported configuration does not use the backend that dsa replaces; None if it
    does."""
    attention, v4 = config.attention_config, config.model_config.hf_config.model_type == "deepseek_v4"
    # V4 ignores backend_per_kind.
    chosen = attention.backend if v4 else attention.backend_per_kind.get("mla_attention", attention.backend)
    if chosen:
        accepted = {BACKEND, f"{BACKEND}_DSV4"} if v4 else {BACKEND}
        return None if chosen.name in accepted else f"attention is {chosen.name}, and dsa has {BACKEND}"
    cache = config.cache_config.cache_dtype
    if not v4 and cache not in CHOSEN_FOR:
        kind = "bf16" if cache in ("auto", *BF16_CACHES) else cache
        return f"vLLM prefers another attention for a {kind} cache, and --attention-backend {BACKEND} asks for dsa's"
    return None


def writes_scores(config: Any, ops: frozenset[str]) -> str | None:
    """Return why a prompt's scores must be written to memory, which rules out `select`; None if they need not be."""
    if config.parallel_config.decode_context_parallel_size > 1:
        return "with decode context parallelism vLLM reads a prompt's scores after the selection"
    return None if "scores" in ops else "DSA_ENGINE_OPS has no scores, which select takes the place of"


def calls_of(config: Any) -> Calls:
    """Return the sizes of the calls of a supported configuration."""
    model, scheduler = config.model_config, config.scheduler_config
    hf, v4 = model.hf_text_config, model.hf_config.model_type == "deepseek_v4"
    next_n, parallel = 1 + config.num_speculative_tokens, config.parallel_config
    return Calls(
        index_heads=hf.index_n_heads,
        index_head_dim=hf.index_head_dim,
        topk=hf.index_topk,
        heads=model.get_num_attention_heads(parallel) * parallel.decode_context_parallel_size,
        query_dim=QUERY_DIMS[model.hf_config.model_type],
        head_dims=(0, 0, 0) if v4 else (hf.qk_nope_head_dim, hf.qk_rope_head_dim, hf.v_head_dim),
        fp8_cache=v4 or config.cache_config.cache_dtype in FP8_CACHES,
        next_n=next_n if next_n in NEXT_N else 1,
        keys=model.max_model_len // (4 if v4 else 1),
        compressed=-(-model.max_model_len // 128) if v4 else 0,
        window=hf.sliding_window if v4 else 0,
        tokens=scheduler.max_num_batched_tokens,
    )
