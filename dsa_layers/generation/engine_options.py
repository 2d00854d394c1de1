"""The options of an engine: their meaning, defaults and limits, and the models that they accept."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dsa.runtime import backends
from dsa.runtime.checks import MOST_SLOTS
from dsa_layers.arguments import flag, integer
from dsa_layers.cache.cache import most_tokens
from dsa_layers.cache.drafts import DRAFTS
from dsa_layers.engine.fp8_up_projection import can_stay_stored
from dsa_layers.layers.attention import DSAAttention
from dsa_layers.models.protocols import Model


@dataclass
class EngineOptions:
    """Options of `Engine` and `Generator`.

    cache_tokens   tokens that the paged cache holds. A sequence waits until there is room for it; one that can never
                   fit is refused. None: on a GPU the memory that is free after loading, minus a tenth of the GPU's
                   memory for activations, and at most the model's context for each of max_sequences. The size is
                   logged, and all ranks take the smallest. On a CPU 65536, or the model's context if that is more and
                   the memory has room
    page_size      tokens per page; None: the model's own choice
    max_sequences  sequences that run at a time; others wait (64)
    prefill_chunk  prompt tokens per pass, over all sequences, and so between two tokens of a sequence (2048)
    cuda_graphs    on a GPU, capture and replay decoding passes. There is one graph per power of two of sequences and of
                   pages of the longest one (True)
    draft_tokens   tokens, up to 3, that the model's multi-token-prediction layer (load_model's drafter=True) drafts
                   after each sequence. The next pass computes the model's tokens after each of them. A draft that the
                   model chooses itself saves a pass. Tokens are those without drafts, except where rounding decides
                   because a pass has more rows (0)
    prefix_cache   keep the full pages of prompts in the cache until their room is needed. A later prompt that begins
                   with the same tokens uses these pages instead of computing them. Tokens are those without a prefix
                   cache, except for rounding. The model's weights must not change. If a cache stores a state per
                   sequence, as DeepSeek-V4's does, it gets up to max_sequences more of them (False)
    batch_invariant  the tokens of a sequence, also sampled ones with a seed, depend neither on other sequences nor on
                   drafts, bit for bit. A pass over prompts then has one prompt. Takes models with FP8 weights in
                   bfloat16 on GPUs, without a prefix_cache; slower (False)
    """

    cache_tokens: int | None = None
    page_size: int | None = None
    max_sequences: int = 64
    prefill_chunk: int = 2048
    cuda_graphs: bool = True
    draft_tokens: int = 0
    prefix_cache: bool = False
    batch_invariant: bool = False


def checked_options(model: Model, given: Mapping[str, Any]) -> EngineOptions:
    """Return all options, with the model's page size. Raise TypeError or ValueError that names the option."""
    options = EngineOptions(**given)
    if options.page_size is None:
        options.page_size = model.page_size
    bounds = {"max_sequences": (1, None), "prefill_chunk": (1, None), "draft_tokens": (0, DRAFTS)}
    for name, (least, most) in ({"page_size": (1, MOST_SLOTS // 4)} | bounds).items():
        setattr(options, name, integer(name, getattr(options, name), at_least=least, at_most=most))
    if options.cache_tokens is not None:
        most = most_tokens(options.page_size)
        options.cache_tokens = integer("cache_tokens", options.cache_tokens, at_least=1, at_most=most)
    for name in ("cuda_graphs", "prefix_cache", "batch_invariant"):
        flag(name, getattr(options, name))
    if options.draft_tokens and getattr(model, "drafter", None) is None:
        raise ValueError(
            "draft_tokens: must be 0 for a model without a drafter (load_model's drafter=True), "
            f"got {options.draft_tokens}"
        )
    if options.batch_invariant:
        check_invariant(model)
        if options.prefix_cache:  # other sequences' prompts would decide where a prompt is cut
            raise ValueError("prefix_cache: must be False with batch_invariant=True, got True")
    return options


def check_invariant(model: Model) -> None:
    """Raise ValueError for a model whose passes would depend on their number of tokens: one that is not on a GPU with
    kernels, or that has no FP8 weights and activations in bfloat16. Several GPUs add their parts in the order of the
    ranks, whichever way the parts take (`Ranks.sum`), and in decoding each GPU has all rows (`rows_of`)."""
    weight, precision = next(model.parameters()), getattr(model, "precision", None)
    if not backends.runs_kernel("linear_fp32", weight):
        where = "the references" if weight.is_cuda else f"a model on {weight.device}"
        raise ValueError(f"batch_invariant: takes a model on a GPU that runs the kernels, got {where}")
    if precision is None or not precision.fp8_linear or not precision.fp8_indexer or precision.dtype != torch.bfloat16:
        raise ValueError(
            f"batch_invariant: takes a model with FP8 weights, FP8 indexers and torch.bfloat16, got {precision}"
        )
    for name, layer in model.named_modules() if isinstance(model, nn.Module) else ():
        if layer._compiled_call_impl is not None:
            raise ValueError(f"batch_invariant: takes a model that is not compiled, got {name or 'one that is'}")
        if isinstance(layer, DSAAttention) and not can_stay_stored(layer):
            sizes = f"nope_dim={layer.nope_dim}, rope_dim={layer.rope_dim}, v_dim={layer.v_dim}"
            raise ValueError(
                f"batch_invariant: takes attention whose kv_b kernels read as it is stored (128 or 192 nope_dim, 64 "
                f"rope_dim, 512 kv_lora_rank, a multiple of 128 v_dim), got {sizes}, "
                f"kv_lora_rank={layer.kv_lora_rank} in {name}"
            )
