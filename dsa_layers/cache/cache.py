"""The protocol of a model's cache."""

from typing import Any, Protocol

import torch

from dsa_layers.cache.kv_cache import PageAllocator


class Cache(Protocol):
    """What generation asks of a cache. A sequence has pages for its tokens, and one state slot for what the cache keeps
    by sequence and not by page. A cache that keeps nothing by sequence limits the number of sequences by state slots.

    page_size    tokens a page
    allocator    hands out pages
    state_slots  hands out state slots
    nbytes       of all its tensors
    """

    page_size: int
    allocator: PageAllocator
    state_slots: PageAllocator

    def layer(self, i: int) -> Any:
        """The tensors that layer i of the model reads and writes."""

    def tensors(self) -> list[torch.Tensor]:
        """All tensors that the cache has allocated."""

    def state_tensors(self) -> list[torch.Tensor]:
        """Those of them that have a row for each state slot, and not for each page."""

    @property
    def nbytes(self) -> int: ...
