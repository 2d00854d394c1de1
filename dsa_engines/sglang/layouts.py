"""Check whether dsa's kernels can read a model's caches in SGLang, and return the sizes of the model's calls."""

from typing import Any, NamedTuple

import torch

from dsa.kernels.indexer.limits import HEADS, MAX_K

V32_BYTES, V4_BYTES = 656, 584  # bytes per key in FlashMLA's FP8 layouts
LATENT_DIM, V4_DIM = 576, 512
INDEX_PAGE = 64  # index keys per page
INDEX_DIM = 128


class Model(NamedTuple):
    """Sizes of a model's calls.

    heads        query heads on this GPU
    query_dim    channels per query head
    topk         selected keys per query
    index_heads  heads of the indexer
    keys         largest number of tokens per sequence
    next_n       draft tokens per sequence that are verified together; 1 without speculation
    fp8_cache    whether the cache stores bytes
    """

    heads: int
    query_dim: int
    topk: int
    index_heads: int
    keys: int
    next_n: int
    fp8_cache: bool

    @property
    def is_v4(self) -> bool:
        return self.query_dim == V4_DIM


class Unsupported(ValueError):
    """dsa cannot serve a model. The message names what was found and what is accepted."""


def mla_layout(pool: Any) -> str | None:
    """Return the layout of DeepSeek-V3.2's latents in a pool, "fp8" or "bf16"; None if the kernels do not support it.

    Two unsupported layouts are similar: FP8 without scales also has 576 numbers per key, and FP8 without rope has 528
    bytes per key.
    """
    width = getattr(pool, "kv_cache_dim", None)
    if getattr(pool, "index_kpool", None) != 1 or getattr(pool, "qk_rope_head_dim", None) != 64:
        return None
    if getattr(pool, "dsa_kv_cache_store_fp8", None):
        return "fp8" if width == V32_BYTES else None
    return "bf16" if width == LATENT_DIM and getattr(pool, "dtype", None) == torch.bfloat16 else None


def v32_model(runner: Any, tensor_parallel: int, draft_tokens: int) -> Model:
    """Return the sizes of a model on the DSA backend. Raise Unsupported if dsa cannot serve it. Raise AttributeError if
    the runner lacks an attribute that is read here."""
    pool, config = runner.token_to_kv_pool, runner.model_config.hf_config
    layout = mla_layout(pool)
    if layout is None:
        facts = ("kv_cache_dim", "dtype", "dsa_kv_cache_store_fp8", "qk_rope_head_dim", "index_kpool")
        found = ", ".join(f"{name} {getattr(pool, name, 'unknown')}" for name in facts)
        raise Unsupported(
            f"the cache has {found}; accepted are {V32_BYTES} bytes a key and {LATENT_DIM} bfloat16 numbers"
        )
    if pool.index_page_size != INDEX_PAGE:
        raise Unsupported(f"the index cache has pages of {pool.index_page_size} keys; accepted are {INDEX_PAGE}")
    heads = runner.model_config.num_attention_heads // tensor_parallel
    return _checked(config, heads, LATENT_DIM, runner.model_config.context_len, draft_tokens, layout == "fp8")


def v4_model(runner: Any, tensor_parallel: int, draft_tokens: int) -> Model:
    """Return the sizes of a model on the DeepSeek-V4 backend. Raises the same errors as `v32_model`."""
    pool, config = runner.token_to_kv_pool, runner.model_config.hf_text_config
    layout, width = pool.get_swa_key_layout().value, pool.get_swa_key_bytes_per_token()
    if (layout, width) != ("v4", V4_BYTES):
        raise Unsupported(f"the cache has layout {layout} of {width} bytes a key; accepted is v4 of {V4_BYTES}")
    heads = runner.model_config.num_attention_heads // tensor_parallel
    return _checked(config, heads, V4_DIM, runner.model_config.context_len, draft_tokens, True)


def _checked(config: Any, heads: int, query_dim: int, keys: int, draft_tokens: int, fp8_cache: bool) -> Model:
    for name, accepted in (("index_n_heads", HEADS), ("index_head_dim", (INDEX_DIM,))):
        if getattr(config, name) not in accepted:
            found = getattr(config, name)
            raise Unsupported(f"{name} is {found}; accepted are {', '.join(map(str, accepted))}")
    if config.index_topk > MAX_K:
        raise Unsupported(f"index_topk is {config.index_topk}; accepted are up to {MAX_K}")
    return Model(heads, query_dim, config.index_topk, config.index_n_heads, keys, draft_tokens, fp8_cache)
