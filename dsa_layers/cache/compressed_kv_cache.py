"""The caches of a model with compressed attention: one ring of window keys per sequence, and pages of entries."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

import dsa
from dsa_layers.cache.cache import Cache, check_storage
from dsa_layers.cache.drafts import DRAFTS


@dataclass(frozen=True)
class EntryCache:
    """The compressed entries of a layer.

    pages  [pages, P, 1, d | 584 | d + 4], as `dsa.write_compressed_kv` takes them
    state  fp32 [state slots, n, 2, c]: the projections of the tokens whose entries are not complete
    """

    pages: torch.Tensor
    state: torch.Tensor


@dataclass(frozen=True)
class CompressedLayerCache:
    """The cache of a layer.

    window         [state slots, window + DRAFTS, 1, d | 584]: a ring for each sequence
    entries        of the layer's compressor; None without one
    index_entries  of its indexer's compressor; None without one
    """

    window: torch.Tensor
    entries: EntryCache | None = None
    index_entries: EntryCache | None = None

    @property
    def is_fp8(self) -> bool:
        return self.window.dtype == torch.uint8


@dataclass(frozen=True)
class EntryShape:
    """The sizes of a compressor's entries: tokens per entry, channels, and the shape of the state of a sequence."""

    ratio: int
    dim: int
    state: tuple[int, int, int]


class CompressedKVCache(Cache):
    """Windows, entries and index entries of all layers.

    Page p of every layer has the entries of the same tokens. State slot s of every layer has the ring of one sequence,
    and the state of the layer's compressors for the sequence's incomplete entries.

    layers          for each layer, the shape of its entries and the shape of its indexer's entries; None if the layer
                    has none
    state_slots     maximum number of sequences at a time
    entries, index  storage of windows and entries, and of index entries: "fp8" for the byte layouts (584 bytes per
                    entry or token, index_dim + 4 bytes per index entry), or a float dtype

    Raises TypeError or ValueError for invalid sizes and storage kinds.
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
        super().__init__(num_pages, page_size, state_slots)
        check_storage("entries", entries)
        check_storage("index", index)
        if entries == "fp8" and dim != 512:
            raise ValueError(f"dim: must be 512 (448 and 64 rope) for the FP8 layout, got {dim}")
        for shape in (shape for pair in layers for shape in pair if shape is not None):
            if page_size % shape.ratio:
                raise ValueError(f"page_size: must be a multiple of {shape.ratio}, an entry's tokens, got {page_size}")

        def rows(pages: int, size: int) -> torch.Tensor:
            if entries == "fp8":
                return dsa.make_v4_cache(pages, size, device)
            return torch.empty(pages, size, 1, dim, dtype=entries, device=device)

        def index_rows(size: int, width: int) -> torch.Tensor:
            width, dtype = (width + 4, torch.uint8) if index == "fp8" else (width, index)
            return torch.empty(num_pages, size, 1, width, dtype=dtype, device=device)

        def entry_cache(shape: EntryShape | None, of_indexer: bool) -> EntryCache | None:
            if shape is None:
                return None
            size = page_size // shape.ratio
            pages = index_rows(size, shape.dim) if of_indexer else rows(num_pages, size)
            return EntryCache(pages, torch.empty(state_slots, *shape.state, dtype=torch.float32, device=device))

        self._layers = [
            CompressedLayerCache(
                rows(state_slots, window + DRAFTS), entry_cache(own, False), entry_cache(indexer, True)
            )
            for own, indexer in layers
        ]

    def layer(self, i: int) -> CompressedLayerCache:
        return self._layers[i]

    def tensors(self) -> list[torch.Tensor]:
        return [*self.state_tensors(), *(part.pages for part in self._entries)]

    def state_tensors(self) -> list[torch.Tensor]:
        return [*(layer.window for layer in self._layers), *(part.state for part in self._entries)]

    @property
    def _entries(self) -> list[EntryCache]:
        return [part for layer in self._layers for part in (layer.entries, layer.index_entries) if part is not None]
