"""The caches of a model with compressed attention: rings of windows by sequence, entries by page."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

import dsa
from dsa_layers.cache.drafts import DRAFTS
from dsa_layers.cache.kv_cache import PageAllocator, check_sizes, check_storage


@dataclass(frozen=True)
class EntryCache:
    """A layer's compressed entries. pages: [pages, P, 1, d | 584 | d + 4] as `dsa.write_compressed_kv` has them;
    state: fp32 [state slots, n, 2, c], the projections of the tokens that entries to come are made of."""

    pages: torch.Tensor
    state: torch.Tensor


@dataclass(frozen=True)
class CompressedLayerCache:
    """The cache of a layer. window: [state slots, window + DRAFTS, 1, d | 584], a ring for each sequence. entries: of
    the layer's compressor; index_entries: of its indexer's compressor; None where the layer lacks it."""

    window: torch.Tensor
    entries: EntryCache | None = None
    index_entries: EntryCache | None = None

    @property
    def is_fp8(self) -> bool:
        return self.window.dtype == torch.uint8


@dataclass(frozen=True)
class EntryShape:
    """The sizes of a compressor's entries: tokens of an entry, channels, and the shape of one sequence's state."""

    ratio: int
    dim: int
    state: tuple[int, int, int]


class CompressedKVCache:
    """Windows, entries and index entries of all layers. Page p of every layer holds the entries of the same tokens.
    State slot s of every layer holds a sequence's ring, and what its compressors keep of unfinished blocks.

    state_slots: the most sequences at a time.
    layers: for each layer the shape of its entries and that of its indexer's entries, or None for what it lacks.
    entries, index: "fp8" for the byte layouts (584 bytes an entry or token, and index_dim + 4), or the float dtype to
    store. Memory is not cleared: what an unused slot holds never reaches a result.
    Raises TypeError or ValueError for sizes and kinds that make no cache.
    """

    def __init__(
        self,
        layers: Sequence[tuple[EntryShape | None, EntryShape | None]],
        num_pages: int,
        page_size: int,
        state_slots: int,
        *,
        window: int,
        dim: int,
        entries: torch.dtype | Literal["fp8"] = torch.bfloat16,
        index: torch.dtype | Literal["fp8"] = "fp8",
        device: torch.device | str = "cpu",
    ) -> None:
        check_sizes(num_pages, page_size, state_slots)
        check_storage("entries", entries)
        check_storage("index", index)
        if entries == "fp8" and dim != 512:
            raise ValueError(f"dim: must be 512 (448 and 64 rope) for the FP8 layout, got {dim}")
        for shape in (shape for pair in layers for shape in pair if shape is not None):
            if page_size % shape.ratio:
                raise ValueError(f"page_size: must be a multiple of {shape.ratio}, an entry's tokens, got {page_size}")
        self.page_size = page_size
        self.allocator, self.state_slots = PageAllocator(num_pages), PageAllocator(state_slots)

        def rows(pages: int, size: int, kind: torch.dtype | str) -> torch.Tensor:
            if kind == "fp8":
                return dsa.make_v4_cache(pages, size, device)
            return torch.empty(pages, size, 1, dim, dtype=kind, device=device)

        def entry_cache(shape: EntryShape | None, kind: torch.dtype | str, is_index: bool) -> EntryCache | None:
            if shape is None:
                return None
            size = page_size // shape.ratio
            if is_index:
                width, dtype = (shape.dim + 4, torch.uint8) if kind == "fp8" else (shape.dim, kind)
                pages = torch.empty(num_pages, size, 1, width, dtype=dtype, device=device)
            else:
                pages = rows(num_pages, size, kind)
            return EntryCache(pages, torch.empty(state_slots, *shape.state, dtype=torch.float32, device=device))

        self._layers = [
            CompressedLayerCache(
                rows(state_slots, window + DRAFTS, entries),
                entry_cache(main, entries, False),
                entry_cache(indexer, index, True),
            )
            for main, indexer in layers
        ]

    def layer(self, i: int) -> CompressedLayerCache:
        return self._layers[i]

    def tensors(self) -> list[torch.Tensor]:
        """All tensors that the cache has allocated."""
        return [*self.state_tensors(), *(part.pages for part in self._entries)]

    def state_tensors(self) -> list[torch.Tensor]:
        """Those that have a row for each state slot: rings, and the state of unfinished blocks."""
        return [*(layer.window for layer in self._layers), *(part.state for part in self._entries)]

    @property
    def _entries(self) -> list[EntryCache]:
        return [part for layer in self._layers for part in (layer.entries, layer.index_entries) if part is not None]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())
