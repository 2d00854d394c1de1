"""The allocator of cache pages, the base class and sizes of caches, and the paged cache of latents and index keys."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch

from dsa.runtime.checks import MOST_SLOTS, integer, shown

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class OutOfPages(RuntimeError):
    """A cache has too few pages or state slots."""


class PageAllocator:
    """An allocator of the numbers of pages or state slots. `allocate` returns a number again only after `release` has
    freed it."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._used: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` free pages and return their numbers. If fewer pages are free, raise OutOfPages and allocate
        none."""
        if integer("count", count, at_least=0) > len(self._free):
            raise OutOfPages(f"{count} pages are needed and {len(self._free)} of {self.num_pages} are free")
        pages = [self._free.pop() for _ in range(count)]
        self._used.update(pages)
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Free pages. If a page is not in use or is named twice, raise ValueError and free none."""
        if wrong := sorted(set(pages) - self._used):
            raise ValueError(f"pages: {wrong} are not in use")
        if len(set(pages)) < len(pages):
            raise ValueError(f"pages: must name each page once, got {pages}")
        self._used.difference_update(pages)
        self._free.extend(reversed(pages))


class Cache:
    """A paged cache. Each sequence has pages for its tokens and one state slot for its data that is not in pages, even
    if there is no such data.

    page_size    tokens per page
    allocator    allocator of pages; in every layer, page p stores the same tokens
    state_slots  allocator of state slots

    Memory may be uninitialised. The constructor raises TypeError or ValueError for invalid sizes, and for more token
    slots than int32 can number.
    """

    def __init__(self, num_pages: int, page_size: int, state_slots: int) -> None:
        integer("num_pages", num_pages, at_least=0)
        integer("page_size", page_size, at_least=1)
        integer("state_slots", state_slots, at_least=0)
        if num_pages * page_size > MOST_SLOTS:
            raise ValueError(
                f"num_pages: must be at most {MOST_SLOTS // page_size}, so that slots are int32, for pages of "
                f"{page_size} tokens, got {shown(num_pages)}"
            )
        self.page_size = page_size
        self.allocator, self.state_slots = PageAllocator(num_pages), PageAllocator(state_slots)

    def layer(self, i: int) -> Any:
        """Return the tensors that layer i of the model reads and writes."""
        raise NotImplementedError

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors of the cache."""
        raise NotImplementedError

    def state_tensors(self) -> list[torch.Tensor]:
        """Return the tensors that have one row per state slot. All other tensors of the cache store pages."""
        return []

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())


@dataclass(frozen=True)
class CacheSizes:
    """The size of a model's cache. page: bytes per page of `page_size` tokens; slot: bytes per state slot.

    Both are sums over the caches of a model and, if there is one, its drafter. They include the padding of
    DeepSeek-V4's FP8 pages and window rings (`dsa.make_v4_cache`).
    """

    page: int
    slot: int
    page_size: int

    @classmethod
    def of(cls, modules: Iterable[Any], page_size: int) -> Self:
        """Return the sizes for `modules`: a model, or a model and its drafter."""
        modules = list(modules)

        def held(pages: int, slots: int) -> int:
            caches = (one.make_cache(pages, page_size, torch.device("meta"), state_slots=slots) for one in modules)
            return sum(tensor.untyped_storage().nbytes() for cache in caches for tensor in cache.tensors())

        one = held(1, 1)
        return cls(held(2, 1) - one, held(1, 2) - one, page_size)

    def pages(self, room: int, sequences: int) -> int:
        """Return the number of pages that fit into `room` bytes together with min(pages, sequences) state slots.
        sequences: the maximum number of concurrent sequences."""
        pages = max(room, 0) // (self.page + self.slot)
        if pages > sequences:
            pages = (room - sequences * self.slot) // self.page
        return pages


def most_tokens(page_size: int) -> int:
    """Return the largest cache size, in tokens, that a caller may request. It leaves one page for rounding up to whole
    pages, and one page for the sequence that pads decoding batches."""
    return MOST_SLOTS - 2 * page_size


def check_storage(name: str, kind: torch.dtype | str) -> None:
    """Raise ValueError unless `kind` is "fp8" or a float dtype that caches support."""
    if kind != "fp8" and kind not in _FLOATS:
        raise ValueError(f"{name}: must be 'fp8', torch.bfloat16, torch.float16 or torch.float32, got {kind!r}")


LATENT_FP8_BYTES = 656  # per token: 512 e4m3 latent channels, 4 fp32 scales, 64 bf16 rope channels


@dataclass(frozen=True)
class LayerCache:
    """The cache pages of one layer. P: tokens per page.

    latent  [pages, P, 1, latent_dim] in a float dtype: latent, then rope key; or uint8 [pages, P, 1, 656], V3.2's
            layout of `dsa.write_kv_cache`
    index   [pages, P, 1, index_dim] in a float dtype: index keys; or uint8 [pages, P, 1, index_dim + 4], the layout of
            `dsa.write_indexer_cache`; None for a layer without index pages. With several tokens per index key, P is the
            number of keys per page
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


class LatentStore:
    """The latents [T, latent + rope] that one layer computes in a pass without a cache, for the layers that share
    them."""

    latents: torch.Tensor | None = None


def read_latents(store: LatentStore | None, *shape: int) -> torch.Tensor:
    """Return the latents in `store`. Raise ValueError if there are none, or if their shape is not `shape`."""
    if store is None or store.latents is None:
        raise ValueError("cache: a layer that shares latents needs a cache or a LatentStore with latents, got none")
    if store.latents.shape != shape:
        raise ValueError(f"cache: must have latents of shape {list(shape)}, got {list(store.latents.shape)}")
    return store.latents


class PagedKVCache(Cache):
    """The latent and index pages of all layers. State slots store nothing.

    latent_dim     channels of a latent and its rope key together
    index_dim      channels of an index key
    latent, index  storage of latents and index keys: "fp8" for the byte layouts of LayerCache, or a float dtype
    index_layers   layers that have index pages; None means all layers
    tokens_per_index_key  a divisor of page_size; an index page has page_size / tokens_per_index_key keys
    sources        for each layer, the layer whose latents it attends to; None: each layer attends to its own
    state_slots    number of state slots; a sequence needs one

    The constructor raises TypeError or ValueError for invalid sizes and storage kinds.
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
        tokens_per_index_key: int = 1,
        sources: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
        state_slots: int = 64,
    ) -> None:
        super().__init__(num_pages, page_size, state_slots)
        if page_size % integer("tokens_per_index_key", tokens_per_index_key, at_least=1):
            told = f"must be a multiple of {tokens_per_index_key}, the tokens of an index key"
            raise ValueError(f"page_size: {told}, got {page_size}")
        check_storage("latent", latent)
        check_storage("index", index)
        if latent == "fp8" and latent_dim != 576:
            raise ValueError(f"latent_dim: must be 576 (512 and 64 rope) for the FP8 layout, got {latent_dim}")
        index_layers = range(num_layers) if index_layers is None else index_layers
        sources = range(num_layers) if sources is None else sources
        if len(sources) != num_layers or not all(source in range(num_layers) for source in sources):
            raise ValueError(f"sources: must be {num_layers} layers from 0 to {num_layers - 1}, got {shown(sources)}")
        rows = {layer: row for row, layer in enumerate(sorted(set(sources)))}
        self._latent_rows = [rows[source] for source in sources]
        self._index_rows = {layer: row for row, layer in enumerate(index_layers)}

        def pages(layers: int, keys: int, kind: torch.dtype | str, width: int, fp8_bytes: int) -> torch.Tensor:
            dtype, width = (torch.uint8, fp8_bytes) if kind == "fp8" else (kind, width)
            return torch.empty(layers, num_pages, keys, 1, width, dtype=dtype, device=device)

        self._latent = pages(len(rows), page_size, latent, latent_dim, LATENT_FP8_BYTES)
        index_keys = page_size // tokens_per_index_key
        self._index = pages(len(index_layers), index_keys, index, index_dim, index_dim + 4)

    def layer(self, i: int) -> LayerCache:
        row = self._index_rows.get(i)
        return LayerCache(self._latent[self._latent_rows[i]], None if row is None else self._index[row])

    def tensors(self) -> list[torch.Tensor]:
        return [self._latent, self._index]
