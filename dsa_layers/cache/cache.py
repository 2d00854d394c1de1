"""What a model's cache must have, whatever it keeps."""

from typing import Any, Protocol

import torch

from dsa_layers.cache.kv_cache import PageAllocator


class Cache(Protocol):
    """What generation asks of a cache. A sequence has pages for its tokens and one state slot for what is kept by
    sequence; a cache that keeps nothing so counts sequences by them.

    page_size    tokens a page
    allocator    hands out pages
    state_slots  hands out state slots
    nbytes       of all its tensors
    """

    page_size: int
    allocator: PageAllocator
    state_slots: PageAllocator

    def layer(self, i: int) -> Any:
        """What layer i of the model reads and writes."""

    def tensors(self) -> list[torch.Tensor]:
        """All that it holds memory in."""

    @property
    def nbytes(self) -> int: ...
