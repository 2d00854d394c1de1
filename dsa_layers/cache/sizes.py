"""The number of pages that fit into memory."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch


@dataclass(frozen=True)
class CacheSizes:
    """Bytes per page of `page_size` tokens and per state slot of a sequence. The caches of a model and its drafter have
    the same numbers of pages and slots, and count together. V4's pages are padded, and the padding counts."""

    page: int
    slot: int
    page_size: int

    @classmethod
    def of(cls, modules: Iterable[Any], page_size: int) -> Self:
        """modules: a model, and its drafter if there is one."""
        modules = list(modules)

        def held(pages: int, slots: int) -> int:
            caches = (one.make_cache(pages, page_size, torch.device("meta"), state_slots=slots) for one in modules)
            return sum(tensor.untyped_storage().nbytes() for cache in caches for tensor in cache.tensors())

        one = held(1, 1)
        return cls(held(2, 1) - one, held(1, 2) - one, page_size)

    def pages(self, room: int, sequences: int) -> int:
        """Return the number of pages that fit into `room` bytes together with the sequences' state slots. There are
        at most `sequences`, and each has at least one page."""
        pages = max(room, 0) // (self.page + self.slot)
        if pages > sequences:
            pages = (room - sequences * self.slot) // self.page
        return pages
