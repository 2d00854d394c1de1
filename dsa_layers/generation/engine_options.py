"""The options of an engine: their meaning, defaults and limits."""

from typing import TypedDict

from dsa_layers.arguments import flag, integer
from dsa_layers.cache.compressed_kv_cache import DRAFTS
from dsa_layers.cache.kv_cache import MOST_SLOTS, most_tokens
from dsa_layers.families.model import Model
from dsa_layers.generation.captured_step import GRAPHS
from dsa_layers.generation.invariant_models import check_invariant


class EngineOptions(TypedDict, total=False):
    """Options of `Engine` and `Generator`.

    cache_tokens   size of the paged cache. Sequences wait for room; one that can never fit is refused. None: on a GPU
                   what is left of its memory after loading, minus a tenth of it for activations, and at most the
                   model's context for each of max_sequences; the size is logged, and all ranks take the least. On a
                   CPU 65536; if a prompt needs more and the memory has room, a larger cache, without cached prefixes,
                   replaces it while no sequence runs
    page_size      tokens per page; None: the model's own choice
    max_sequences  sequences that run at a time; others wait (64)
    prefill_chunk  prompt tokens per pass, over all sequences, and so between two tokens of a sequence (2048)
    cuda_graphs    on a GPU, capture and replay decoding passes (`DecodeStep`) (True)
    max_graphs     CUDA graphs that are kept, and as many of the drafter's: one per power of two of sequences and of
                   pages of the longest one. If another one is captured, the least recently used one is dropped (96)
    draft_tokens   tokens, up to 3, that the model's multi-token-prediction layer (load_model's drafter=True) drafts
                   after each sequence. The next pass computes what the model has after each of them. A draft that the
                   model chooses itself saves a pass. Tokens are those without drafts, except that rounding decides
                   where a pass has more rows, unless batch_invariant (0)
    prefix_cache   keep the full pages of a prompt in the cache until their room is needed. A later prompt that begins
                   with the same tokens uses them instead of computing them again. What is on a page is what the prompt
                   would compute if it was cut into chunks there: tokens are those without, except for rounding. The
                   model's weights must not change. Of what a cache keeps by sequence, as DeepSeek-V4's does, there are
                   up to max_sequences copies more (`SharedPrefixes`) (False)
    batch_invariant  the tokens of a sequence depend on no other sequence and not on drafts, bit for bit: decoding
                   passes give a token the same bits whatever else they compute, and a pass over prompts has one
                   prompt. With a seed also sampled ones. For models with FP8 weights, in bfloat16, on GPUs, without a
                   prefix_cache; slower (False)
    """

    cache_tokens: int | None
    page_size: int | None
    max_sequences: int
    prefill_chunk: int
    cuda_graphs: bool
    max_graphs: int
    draft_tokens: int
    prefix_cache: bool
    batch_invariant: bool


DEFAULTS: EngineOptions = {
    "cache_tokens": None,
    "page_size": None,
    "max_sequences": 64,
    "prefill_chunk": 2048,
    "cuda_graphs": True,
    "max_graphs": GRAPHS,
    "draft_tokens": 0,
    "prefix_cache": False,
    "batch_invariant": False,
}


def checked_options(model: Model, options: EngineOptions) -> EngineOptions:
    """Return all options, with the model's page size. Raise TypeError or ValueError that names the option."""
    if unknown := options.keys() - DEFAULTS.keys():
        raise TypeError(f"{', '.join(sorted(unknown))}: unknown options; accepted are {', '.join(DEFAULTS)}")
    options = DEFAULTS | options
    page_size = options["page_size"]
    page_size = model.page_size if page_size is None else page_size
    page_size = integer("page_size", page_size, at_least=1, at_most=MOST_SLOTS // 4)
    cache_tokens = options["cache_tokens"]
    if cache_tokens is not None:
        cache_tokens = integer("cache_tokens", cache_tokens, at_least=1, at_most=most_tokens(page_size))
    checked: EngineOptions = {
        "cache_tokens": cache_tokens,
        "page_size": page_size,
        "max_sequences": integer("max_sequences", options["max_sequences"], at_least=1),
        "prefill_chunk": integer("prefill_chunk", options["prefill_chunk"], at_least=1),
        "draft_tokens": integer("draft_tokens", options["draft_tokens"], at_least=0, at_most=DRAFTS),
    }
    if checked["draft_tokens"] and getattr(model, "drafter", None) is None:
        raise ValueError(
            "draft_tokens: must be 0 for a model without a drafter (load_model's drafter=True), "
            f"got {checked['draft_tokens']}"
        )
    for name in ("cuda_graphs", "prefix_cache"):
        checked[name] = flag(name, options[name])
    checked["max_graphs"] = integer("max_graphs", options["max_graphs"], at_least=1)
    checked["batch_invariant"] = flag("batch_invariant", options["batch_invariant"])
    if checked["batch_invariant"]:
        check_invariant(model)
        if checked["prefix_cache"]:  # which decides where a prompt is cut, by the others
            raise ValueError("prefix_cache: must be False with batch_invariant=True, got True")
    return checked
