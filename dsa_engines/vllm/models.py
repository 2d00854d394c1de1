"""Which models of vLLM's the plugin serves, and the sizes of the calls that one makes."""

from dataclasses import dataclass
from typing import Any

import torch

from dsa.kernels.indexer.limits import HEAD_DIMS, HEADS, MAX_K, NEXT_N
from dsa.runtime import backends

# model_type of the configuration -> the channels of a query of its sparse attention. Other models of vLLM share parts
# of these models' code and have caches that dsa has no kernels for: DeepSeek-V4.1's keys of 528 and 288 bytes, the
# pooled index keys of GLM-5.3.
QUERY_DIMS = {"deepseek_v32": 576, "glm_moe_dsa": 576, "deepseek_v4": 512}
# How vLLM calls its caches of bf16, and of bytes of which a key has 656 or, in V4, 584. "auto" is bytes in V4 and bf16
# elsewhere.
BF16_CACHES = ("bfloat16",)
BACKEND = "FLASHMLA_SPARSE"  # of vLLM's attention
FP8_CACHES = ("fp8", "fp8_e4m3", "fp8_ds_mla")
CHOSEN_FOR = (
    "fp8",
    "fp8_ds_mla",
)  # caches for which V3.2's and GLM-5's attention is that backend, if none is asked for


@dataclass(frozen=True)
class Calls:
    """What decides which kernels a model needs."""

    index_heads: int
    index_head_dim: int
    topk: int
    heads: int  # of a query on a GPU: those of several GPUs where these share the keys
    query_dim: int
    head_dims: tuple[int, int, int]  # channels of a head's keys without and with rope, and of its values; 0 in V4
    fp8_cache: bool  # the attention's keys are bytes
    next_n: int  # the most queries of a sequence that decoding computes together; 1 if it never does
    keys: int  # the most that a query has scores of
    compressed: int  # in V4, the most entries of 128 tokens that a query has, else 0
    window: int  # in V4, how many of the latest tokens a query has, else 0
    tokens: int  # the most of a step


def selects_keys(config: Any) -> bool:
    """Whether a model has an indexer, and so calls what is replaced; True if the configuration does not say."""
    try:
        return hasattr(config.model_config.hf_text_config, "index_topk")
    except AttributeError:
        return True


def unsupported(config: Any) -> str | None:
    """None for a configuration of vLLM's whose model can run on dsa, on the current GPU; else what it lacks."""
    if reason := backends.why_no_kernels():
        return reason
    if backends.backend() == "reference":  # which waits for the GPU, and cannot be captured
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
    """None where the attention that vLLM chooses for a configuration that is supported is the one that is replaced;
    else which one it is, and what asks for that."""
    attention, v4 = config.attention_config, config.model_config.hf_config.model_type == "deepseek_v4"
    # V4 does not look at the kinds.
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
    """The sizes of the calls of a configuration that is supported."""
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
