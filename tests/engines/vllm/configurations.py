"""Stand-ins for vLLM's configuration, with the fields that the plugin reads."""

import types

import torch

V32 = {
    "model_type": "deepseek_v32",
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
GLM = V32 | {"model_type": "glm_moe_dsa", "index_n_heads": 32, "qk_nope_head_dim": 192, "v_head_dim": 256}
V4 = {
    "model_type": "deepseek_v4",
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "sliding_window": 128,
}


def config(
    hf: dict,
    heads: int = 128,
    cache: str = "auto",
    index_cache: str = "auto",
    speculated: int = 0,
    max_model_len: int = 163840,
    tokens: int = 8192,
    dtype: torch.dtype = torch.bfloat16,
    sharing: int = 1,
    backend: str | None = None,
) -> types.SimpleNamespace:
    """Return a stand-in for a VllmConfig.

    heads: query heads per GPU. index_cache: dtype of the cache of index keys. speculated: draft tokens per sequence.
    tokens: maximum number of tokens in a step. sharing: the number of GPUs that divide a sequence's keys (decode
    context parallelism).
    """
    space = types.SimpleNamespace
    hf = space(**hf)
    return space(
        model_config=space(
            hf_config=hf,
            hf_text_config=hf,
            dtype=dtype,
            max_model_len=max_model_len,
            get_num_attention_heads=lambda parallel: heads,
        ),
        attention_config=space(
            backend=backend and space(name=backend),
            backend_per_kind={},
            resolve_indexer_kv_dtype=lambda default: default if index_cache == "auto" else index_cache,
        ),
        cache_config=space(cache_dtype=cache),
        parallel_config=space(decode_context_parallel_size=sharing),
        scheduler_config=space(max_num_batched_tokens=tokens),
        num_speculative_tokens=speculated,
    )
