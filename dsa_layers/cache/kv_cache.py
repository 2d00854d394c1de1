"""The paged caches of a model: latents and index keys, and who owns which page."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from dsa.runtime.checks import MOST_SLOTS
from dsa_layers.arguments import integer, shown

LATENT_FP8_BYTES = 656
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class LayerCache:
    """One layer's pages.

    latent  [pages, P, 1, 576]: latent | rope in a float dtype; or uint8 [pages, P, 1, 656]: e4m3 with fp32 scales
    index   uint8 [pages, P, 1, 132]: e4m3 index keys, then fp32 scales; or [pages, P, 1, 128] in a float dtype; None
            for a layer without an indexer
    """

    latent: torch.Tensor
    index: torch.Tensor | None

    @property
    def page_size(self) -> int:
        return self.latent.shape[1]

    @property
    def latent_is_fp8(self) -> bool:
        return self.latent.dtype == torch.uint8

    @property
    def index_is_fp8(self) -> bool:
        return self.index.dtype == torch.uint8


def check_sizes(num_pages: int, page_size: int, state_slots: int) -> None:
    """Raises TypeError or ValueError for sizes that make no cache, and for more slots than int32 can number."""
    integer("num_pages", num_pages, at_least=0)
    integer("page_size", page_size, at_least=1)
    integer("state_slots", state_slots, at_least=0)
    if num_pages * page_size > MOST_SLOTS:
        raise ValueError(
            f"num_pages: must be at most {MOST_SLOTS // page_size}, so that slots are int32, for pages of {page_size} "
            f"tokens, got {shown(num_pages)}"
        )


def most_tokens(page_size: int) -> int:
    """The largest cache that callers may ask for. Padding sequences have pages besides."""
    return MOST_SLOTS - 2 * page_size


def check_storage(name: str, kind: torch.dtype | str) -> None:
    """Raises ValueError for a kind of storage that caches do not have."""
    if kind != "fp8" and kind not in _FLOATS:
        raise ValueError(f"{name}: must be 'fp8', torch.bfloat16, torch.float16 or torch.float32, got {kind!r}")


class OutOfPages(RuntimeError):
    """The cache has fewer free pages than a sequence needs."""


class PageAllocator:
    """Hands out the numbers of free pages, each to one owner at a time."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = integer("num_pages", num_pages, at_least=0)
        self._free = list(range(self.num_pages - 1, -1, -1))
        self._used: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """The numbers of `count` free pages. Raises OutOfPages, and takes none, if fewer are free."""
        if integer("count", count, at_least=0) > len(self._free):
            raise OutOfPages(f"{count} pages are needed and {len(self._free)} of {self.num_pages} are free")
        pages = [self._free.pop() for _ in range(count)]
        self._used.update(pages)
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Gives pages back. Raises ValueError, and gives none back, if one is not in use or is named twice: a page with
        two owners would mix two sequences."""
        pages = [integer(f"pages[{i}]", page) for i, page in enumerate(pages)]
        if wrong := sorted(set(pages) - self._used):
            raise ValueError(f"pages: {wrong} are not in use")
        if len(set(pages)) < len(pages):
            raise ValueError(f"pages: must name each page once, got {pages}")
        self._used.difference_update(pages)
        self._free.extend(reversed(pages))


class PagedKVCache:
    """Latent and index pages of all layers, and their allocator. Page p of every layer holds the same tokens.

    latent, index: "fp8" for the byte layouts of LayerCache, or the float dtype to store.
    index_layers: the layers that have index pages; all of them if None.
    state_slots: the most sequences at a time. This cache keeps nothing by sequence.
    Memory is not cleared: what an unused slot holds never reaches a result.
    Raises TypeError or ValueError for sizes and kinds that make no cache.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int = 64,
        *,
        latent_dim: int = 576,
        index_dim: int = 128,
        latent: torch.dtype | Literal["fp8"] = torch.bfloat16,
        index: torch.dtype | Literal["fp8"] = "fp8",
        index_layers: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
        state_slots: int = 64,
    ) -> None:
        check_sizes(num_pages, page_size, state_slots)
        check_storage("latent", latent)
        check_storage("index", index)
        if latent == "fp8" and latent_dim != 576:
            raise ValueError(f"latent_dim: must be 576 (512 and 64 rope) for the FP8 layout, got {latent_dim}")
        pages = (num_pages, page_size, 1)
        latent_width = LATENT_FP8_BYTES if latent == "fp8" else latent_dim
        self._latent = _pages((num_layers, *pages), latent_width, latent, device)
        index_layers = range(num_layers) if index_layers is None else index_layers
        self._index_rows = {layer: row for row, layer in enumerate(index_layers)}
        index_width = index_dim + 4 if index == "fp8" else index_dim
        self._index = _pages((len(index_layers), *pages), index_width, index, device)
        self.page_size = page_size
        self.allocator, self.state_slots = PageAllocator(num_pages), PageAllocator(state_slots)

    def layer(self, i: int) -> LayerCache:
        row = self._index_rows.get(i)
        return LayerCache(self._latent[i], None if row is None else self._index[row])

    def tensors(self) -> list[torch.Tensor]:
        """All tensors that the cache has allocated."""
        return [self._latent, self._index]

    def state_tensors(self) -> list[torch.Tensor]:
        """None."""
        return []

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())


def _pages(shape: tuple[int, ...], width: int, kind: torch.dtype | str, device: torch.device | str) -> torch.Tensor:
    return torch.empty(*shape, width, dtype=torch.uint8 if kind == "fp8" else kind, device=device)
