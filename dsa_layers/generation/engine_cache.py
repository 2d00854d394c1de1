"""The paged cache of an engine, and how large it is."""

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import replace

import torch

from dsa_layers.cache.cache import Cache
from dsa_layers.cache.kv_cache import MOST_SLOTS
from dsa_layers.cache.sizes import CacheSizes
from dsa_layers.cache.state_copies import StateCopies
from dsa_layers.families.model import Model
from dsa_layers.generation.passes import Passes
from dsa_layers.generation.sequence_memory import SequenceMemory
from dsa_layers.generation.shared_prefixes import SharedPrefixes
from dsa_layers.io.memory import room_for_caches
from dsa_layers.parallel.process_group import least
from dsa_layers.parallel.ranks import ALONE, Ranks
from dsa_layers.parallel.together import together

_LOGGER = logging.getLogger(__name__)
CPU_CACHE_TOKENS = 65536


class EngineCache:
    """The cache, the passes that use it, and the memory of sequences in it.

    cache_tokens   None: on a GPU what the free memory allows, at most the model's context for each of max_sequences; on
                   a CPU CPU_CACHE_TOKENS, and `grow` makes a larger cache
    max_sequences  sequences that run at a time
    drafts         draft tokens per sequence
    prefix_cache   whether sequences share pages
    options        of `Passes`
    """

    def __init__(
        self,
        model: Model,
        *,
        cache_tokens: int | None,
        page_size: int,
        max_sequences: int,
        drafts: int,
        prefix_cache: bool,
        **options: int,
    ) -> None:
        self._model, self.page_size, self._max_sequences = model, page_size, max_sequences
        self._drafts, self._prefix_cache, self._options = drafts, prefix_cache, options
        self._device = next(model.parameters()).device
        self._ranks: Ranks = getattr(model, "ranks", ALONE)
        self._copies_states = prefix_cache and self._keeps_states()
        self.grows = cache_tokens is None and self._device.type == "cpu"
        with together(self._ranks):
            capacity = self.default_capacity() if cache_tokens is None else -(-cache_tokens // page_size)
        capacity = least(self._ranks, capacity)
        with together(self._ranks):
            self._allocate(capacity)
        if cache_tokens is None and self._device.type == "cuda" and self._ranks.rank == 0:
            _LOGGER.info("The cache holds %d tokens.", capacity * page_size)

    def pages(self, tokens: int) -> int:
        """Return the pages of a sequence with this many tokens and its drafts."""
        return -(-(tokens + self._drafts) // self.page_size)

    def fits(self, tokens: int) -> bool:
        """Return whether the cache, or one that `grow` makes, can hold a sequence of this many tokens."""
        return self.pages(tokens) <= self.capacity or (self.grows and self.pages(tokens) <= self.room(1))

    def why_too_small(self, prompt: int, new: int) -> str:
        drafts = f" and {self._drafts} draft{'s' * (self._drafts > 1)}" if self._drafts else ""
        return (
            f"{prompt} prompt tokens and {new} new ones{drafts} need {self.pages(prompt + new)} pages of "
            f"{self.page_size} tokens; the cache has {self.capacity} (cache_tokens)"
        )

    def grow(self, tokens: int) -> None:
        """Replace the cache by a larger one if it cannot hold a sequence of this many tokens. No sequence may run."""
        pages = self.pages(tokens)
        if not self.grows or pages <= self.capacity:
            return
        with together(self._ranks):
            self._allocate(pages)
        if self._ranks.rank == 0:
            _LOGGER.info("The cache was made anew and holds %d tokens.", pages * self.page_size)

    @property
    def context(self) -> int:
        """The tokens of the model's context."""
        return self._model.config.max_position_embeddings

    def default_capacity(self) -> int:
        """Return the pages of a cache whose size is not given. Raise ValueError if a GPU has no room for one."""
        most = min(self._max_sequences * self.pages(self.context), MOST_SLOTS // self.page_size - 2)
        if self.grows:
            return min(most, -(-CPU_CACHE_TOKENS // self.page_size))
        capacity = min(most, self.room(self._max_sequences))
        if capacity < 1:
            raise ValueError(f"cache_tokens: the memory of {self._device} has no room for the model and a cache")
        return capacity

    def room(self, sequences: int) -> int:
        """Return the pages for which the device has free memory, besides the state slots of so many sequences."""
        room = room_for_caches(self._device)
        if room is None:
            return MOST_SLOTS // self.page_size - 2
        sizes = CacheSizes.of(self._cached_models, self.page_size)
        if self._copies_states:
            sizes = replace(sizes, slot=2 * sizes.slot)
        return sizes.pages(room - self._padding_pages * sizes.page - sizes.slot, sequences)

    @property
    def _cached_models(self) -> tuple[Model, ...]:
        return (self._model, self._model.drafter) if self._drafts else (self._model,)

    @property
    def _padding_pages(self) -> int:
        """Of `DecodeStep`, for padding sequences."""
        return self.pages(1)

    def _allocate(self, capacity: int) -> None:
        # Each sequence has at least one page. DecodeStep has a state slot and pages of its own for padding sequences.
        most = min(self._max_sequences, capacity)
        copied = most if self._copies_states else 0
        pages, slots = capacity + self._padding_pages, most + copied + 1
        with self._allocating(pages, slots), torch.inference_mode(False):  # callers may write to the cache, too
            cache: Cache = self._model.make_cache(pages, self.page_size, self._device, state_slots=slots)
            passes = Passes(self._model, cache, drafts=self._drafts, **self._options)
        self.cache, self.passes, self.capacity = cache, passes, capacity
        self.memory = SequenceMemory(cache, self._drafts)
        if self._prefix_cache:
            copies = StateCopies(passes.caches, copied) if copied else None
            self.memory = SharedPrefixes(cache, self._drafts, copies)

    def _keeps_states(self) -> bool:
        """Return whether the model's cache keeps something by sequence."""
        return bool(self._model.make_cache(1, self.page_size, "meta", state_slots=1).state_tensors())

    @contextlib.contextmanager
    def _allocating(self, pages: int, state_slots: int) -> Iterator[None]:
        """Raise ValueError with the size of the caches if there is not enough memory."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not _is_about_memory(error):
                raise
            caches = [
                one.make_cache(pages, self.page_size, "meta", state_slots=state_slots) for one in self._cached_models
            ]
            raise ValueError(
                f"cache_tokens: a cache of {(pages - 1) * self.page_size} tokens takes "
                f"{sum(cache.nbytes for cache in caches) / 1e9:.1f} GB, which cannot be allocated on {self._device}"
            ) from error


def _is_about_memory(error: Exception) -> bool:
    """A CPU's allocator raises a plain RuntimeError."""
    told = any(words in str(error) for words in ("out of memory", "DefaultCPUAllocator"))
    return told or isinstance(error, MemoryError | torch.OutOfMemoryError)
