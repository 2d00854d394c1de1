"""How many pages memory has room for."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, Self

import torch

from dsa_layers.cache.cache import Cache


class MakesCache(Protocol):
    """A model, or its drafter."""

    def make_cache(self, num_pages: int, page_size: int, device: torch.device | str, *, state_slots: int) -> Cache: ...


@dataclass(frozen=True)
class CacheSizes:
    """Bytes of memory per page of `page_size` tokens and per state slot of a sequence, over the caches of a model and
    its drafter, which share pages and slots. V4's pages are padded, and the padding counts."""

    page: int
    slot: int
    page_size: int

    @classmethod
    def of(cls, modules: Iterable[MakesCache], page_size: int) -> Self:
        modules = list(modules)

        def held(pages: int, slots: int) -> int:
            caches = (one.make_cache(pages, page_size, torch.device("meta"), state_slots=slots) for one in modules)
            return sum(tensor.untyped_storage().nbytes() for cache in caches for tensor in cache.tensors())

        one = held(1, 1)
        return cls(held(2, 1) - one, held(1, 2) - one, page_size)

    def pages(self, room: int, sequences: int) -> int:
        """How many pages so many bytes hold, with a state slot for each of the sequences that have a page: as many as
        there are pages, up to `sequences`."""
        pages = max(room, 0) // (self.page + self.slot)
        if pages > sequences:
            pages = (room - sequences * self.slot) // self.page
        return pages
