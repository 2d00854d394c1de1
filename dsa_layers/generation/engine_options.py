"""The options of an engine: their meaning, defaults and limits."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsa.runtime.checks import MOST_SLOTS
from dsa_layers.arguments import flag, integer
from dsa_layers.cache.cache import most_tokens
from dsa_layers.cache.drafts import DRAFTS
from dsa_layers.generation.invariant_models import check_invariant
from dsa_layers.generation.steps import GRAPHS
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
    cuda_graphs    on a GPU, capture and replay decoding passes (True)
    max_graphs     CUDA graphs to keep, and as many of the drafter's. There is one per power of two of sequences and of
                   pages of the longest one. The least recently used one is dropped (96)
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
    max_graphs: int = GRAPHS
    draft_tokens: int = 0
    prefix_cache: bool = False
    batch_invariant: bool = False


def checked_options(model: Model, given: Mapping[str, Any]) -> EngineOptions:
    """Return all options, with the model's page size. Raise TypeError or ValueError that names the option."""
    options = EngineOptions(**given)
    if options.page_size is None:
        options.page_size = model.page_size
    options.page_size = integer("page_size", options.page_size, at_least=1, at_most=MOST_SLOTS // 4)
    if options.cache_tokens is not None:
        most = most_tokens(options.page_size)
        options.cache_tokens = integer("cache_tokens", options.cache_tokens, at_least=1, at_most=most)
    for name in ("max_sequences", "prefill_chunk", "max_graphs"):
        setattr(options, name, integer(name, getattr(options, name), at_least=1))
    for name in ("cuda_graphs", "prefix_cache", "batch_invariant"):
        flag(name, getattr(options, name))
    options.draft_tokens = integer("draft_tokens", options.draft_tokens, at_least=0, at_most=DRAFTS)
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
