"""`EngineOptions`, the options of an engine, with their checks; and `Capacity`, the size of the engine's cache."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from dsa.runtime import backends
from dsa.runtime.checks import MOST_SLOTS, check_flag, integer
from dsa_layers.cache.drafts import DRAFTS
from dsa_layers.cache.kv_cache import Cache, CacheSizes, most_tokens
from dsa_layers.engine.attention_form import can_stay_stored
from dsa_layers.io.gpu_plan import room_for_caches
from dsa_layers.layers.attention import DSAAttention
from dsa_layers.models.protocols import Model

CPU_CACHE_TOKENS = 65536


@dataclass
class EngineOptions:
    """Options of `Engine` and `Generator`. The default is in parentheses at the end of an entry.

    cache_tokens   number of tokens that the paged cache holds, rounded up to full pages. A sequence that can never fit
                   is refused. With None, the size depends on the device. On a GPU, the cache uses the memory that is
                   free after loading, minus a tenth of the GPU's memory for activations, and the size is logged. On a
                   CPU, the cache holds 65536 tokens, or the model's context if that is more. On both, it holds at most
                   max_sequences times the model's context. With several ranks, all use the smallest of their sizes
                   (None)
    page_size      number of tokens per page; None: the model's page size (None)
    max_sequences  largest number of sequences that run at a time; other sequences wait (64)
    prefill_chunk  largest number of prompt tokens per pass, over all sequences. It bounds how long a running sequence
                   waits between two tokens (2048)
    cuda_graphs    whether decoding passes on a GPU are captured as CUDA graphs and replayed. There is one graph per
                   size of a pass. The size is the number of sequences and the number of pages of the longest sequence,
                   each rounded up to a power of two (True)
    draft_tokens   number of tokens, up to 3, that the model's multi-token-prediction layer (load_model's drafter=True)
                   drafts after each sequence. The next pass verifies the drafts: it computes the model's token after
                   each draft. Each accepted draft saves the sequence a pass. Output matches runs without drafts up to
                   rounding (0)
    prefix_cache   whether full pages of prompts stay in the cache until their memory is needed. A later prompt that
                   begins with the same tokens reuses these pages. Output matches runs without a prefix cache up to
                   rounding. The model's weights must not change while the engine exists. If the cache stores a state
                   per sequence, as DeepSeek-V4's does, this option adds memory for up to max_sequences states (False)
    batch_invariant  whether a sequence's tokens, including tokens sampled with a seed, are independent of other
                   sequences and of drafts, bit for bit. If so, a prefill pass computes one prompt only, which is
                   slower. `check_invariant` lists the conditions on the model; prefix_cache must be False (False)
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
    """Return `EngineOptions` with the fields `given`, and with the model's page size if none is given. If an option is
    wrong or the model does not support it, raise TypeError or ValueError with the option's name."""
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
        check_flag(name, getattr(options, name))
    if options.draft_tokens and getattr(model, "drafter", None) is None:
        raise ValueError(
            "draft_tokens: must be 0 for a model without a drafter (load_model's drafter=True), "
            f"got {options.draft_tokens}"
        )
    if options.batch_invariant:
        check_invariant(model)
        if options.prefix_cache:  # the positions at which passes split a prompt would depend on other prompts
            raise ValueError("prefix_cache: must be False with batch_invariant=True, got True")
    return options


def check_invariant(model: Model) -> None:
    """Raise ValueError if a model does not support batch_invariant=True. A supported model is on a GPU that runs the
    kernels, has FP8 weights, FP8 indexers and bfloat16 activations, and is not compiled by torch.compile. Its
    `DSAAttention` layers, if any, have no gate, and the kernels support their FP8 kv_b projection as the checkpoint
    stores it (`can_stay_stored`).

    A model on several GPUs is supported too: `Ranks.sum` adds the ranks' parts in the order of the ranks."""
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
                f"batch_invariant: takes attention without a gate whose kv_b kernels read as it is stored (128 or 192 "
                f"nope_dim, 64 rope_dim, 512 kv_lora_rank, a multiple of 128 v_dim), got gate={layer.gate!r}, {sizes}, "
                f"kv_lora_rank={layer.kv_lora_rank} in {name}"
            )


class Capacity:
    """The sizes of an engine's cache.

    context  the number of tokens in the model's context
    pages    the number of pages for sequences and their drafts (`EngineOptions.cache_tokens`). The cache also has pages
             and a state slot for the sequence that pads decoding batches (`DecodeStep`)

    The constructor raises ValueError if cache_tokens is None and a GPU has no room for a cache.
    """

    def __init__(self, model: Model, options: EngineOptions, device: torch.device) -> None:
        self._options = options
        self.context = model.config.max_position_embeddings
        self.pages = -(-(options.cache_tokens or 0) // options.page_size) or self._default_pages(model, device)

    def of(self, tokens: int) -> int:
        """Return the number of pages that a sequence of `tokens` tokens and its drafts needs."""
        return -(-(tokens + self._options.draft_tokens) // self._options.page_size)

    @property
    def sequences(self) -> int:
        """The largest number of sequences that run at a time. Each needs at least one page."""
        return min(self._options.max_sequences, self.pages)

    def make_cache(self, model: Model, device: torch.device) -> Cache:
        """Create the model's cache, with a state slot per sequence and one for padding. With prefix_cache, add another
        slot per sequence for copies of states."""
        state_slots = self.sequences * (1 + self._options.prefix_cache) + 1
        pages = self.pages + self.of(1)
        return model.make_cache(pages, page_size=self._options.page_size, device=device, state_slots=state_slots)

    def _default_pages(self, model: Model, device: torch.device) -> int:
        options = self._options
        # Slot numbers are int32, which limits the number of pages. Reserve two pages for the sequence that pads
        # decoding batches.
        most = min(options.max_sequences * self.of(self.context), MOST_SLOTS // options.page_size - 2)
        if device.type != "cuda":
            return min(most, max(-(-CPU_CACHE_TOKENS // options.page_size), self.of(self.context)))
        sizes = CacheSizes.of((model, model.drafter) if options.draft_tokens else (model,), options.page_size)
        room = room_for_caches(device) - self.of(1) * sizes.page - sizes.slot
        with_copies = replace(sizes, slot=sizes.slot * (1 + options.prefix_cache))
        pages = min(most, with_copies.pages(room, options.max_sequences))
        if pages < 1:
            raise ValueError(f"cache_tokens: the memory of {device} has no room for the model and a cache")
        return pages
