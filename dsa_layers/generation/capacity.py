"""The number of pages of an engine's cache."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import torch

from dsa.runtime.checks import MOST_SLOTS
from dsa_layers.cache.cache import CacheSizes
from dsa_layers.generation.engine_options import EngineOptions
from dsa_layers.io.memory import room_for_caches
from dsa_layers.models.protocols import Model

CPU_CACHE_TOKENS = 65536


class Capacity:
    """The sizes of an engine's cache.

    context    tokens of the model's context
    sizes      bytes of the caches of the model and, with drafts, of the drafter
    padding    pages of the sequence that pads decoding batches (`DecodeStep`); they are not among `pages`
    pages      pages of the cache for sequences. Without cache_tokens they are what the free memory of a GPU allows, at
               most the context for each of max_sequences. On a CPU, which only commits pages that are written, they
               hold at least one sequence of the whole context, if there is memory for it.

    Raises ValueError if a GPU has no room for a cache.
    """

    def __init__(self, model: Model, options: EngineOptions, device: torch.device) -> None:
        self._options, self._device = options, device
        self.context = model.config.max_position_embeddings
        modules = (model, model.drafter) if options.draft_tokens else (model,)
        self.sizes = CacheSizes.of(modules, options.page_size)
        self.padding = self.of(1)
        self.pages = -(-(options.cache_tokens or 0) // options.page_size) or self._default_pages()

    def of(self, tokens: int) -> int:
        """Return the pages of a sequence with this many tokens and its drafts."""
        return -(-(tokens + self._options.draft_tokens) // self._options.page_size)

    @property
    def copies(self) -> int:
        """The number of state slots for copies at the ends of prefixes. Without state per sequence it is 0."""
        return self.sequences if self._options.prefix_cache and self.sizes.slot else 0

    @property
    def sequences(self) -> int:
        """The most sequences that run at a time. Each has at least one page."""
        return min(self._options.max_sequences, self.pages)

    @property
    def total_pages(self) -> int:
        return self.pages + self.padding

    @property
    def state_slots(self) -> int:
        """State slots of sequences, of copies and of the padding sequence."""
        return self.sequences + self.copies + 1

    def _default_pages(self) -> int:
        options, largest = self._options, MOST_SLOTS // self._options.page_size - 2
        most = min(options.max_sequences * self.of(self.context), largest)
        room = room_for_caches(self._device)
        pages = most
        if room is not None:
            slot = self.sizes.slot * (2 if options.prefix_cache else 1)  # one for the copy
            reserved = self.padding * self.sizes.page + self.sizes.slot
            pages = min(most, replace(self.sizes, slot=slot).pages(room - reserved, options.max_sequences))
        if self._device.type == "cpu":
            few = -(-CPU_CACHE_TOKENS // options.page_size)
            return min(most, max(few, min(pages, self.of(self.context))))
        if pages < 1:
            raise ValueError(f"cache_tokens: the memory of {self._device} has no room for the model and a cache")
        return pages

    @contextlib.contextmanager
    def allocating(self) -> Iterator[None]:
        """Raise ValueError with the size of the caches if they cannot be allocated within the block."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            # A CPU's allocator raises a plain RuntimeError.
            about_memory = any(words in str(error) for words in ("out of memory", "DefaultCPUAllocator"))
            if not about_memory and not isinstance(error, MemoryError | torch.OutOfMemoryError):
                raise
            held = self.total_pages * self.sizes.page + self.state_slots * self.sizes.slot
            raise ValueError(
                f"cache_tokens: a cache of {self.pages * self._options.page_size} tokens takes {held / 1e9:.1f} GB, "
                f"which cannot be allocated on {self._device}"
            ) from error
