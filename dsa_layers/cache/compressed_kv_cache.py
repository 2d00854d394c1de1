"""The cache of a model with compressed attention: window rings and compressor states per sequence, pages of entries."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

import dsa
from dsa_layers.cache.drafts import DRAFTS
from dsa_layers.cache.kv_cache import Cache, check_storage


@dataclass(frozen=True)
class EntryCache:
    """The cache of one compressor of a layer.

    pages  [pages, P, 1, width]: the entries, P per page, in a layout of `dsa.write_compressed_kv`. width: with a float
           dtype, the channels of an entry; with uint8, the bytes of an entry: 584, or channels + 4 in an indexer's
           cache
    state  fp32 [state slots, n, 2, c]: the compressor's two projections, each of c channels, of the last n tokens of a
           sequence (`Compressor.state_shape`)
    """

    pages: torch.Tensor
    state: torch.Tensor


@dataclass(frozen=True)
class CompressedLayerCache:
    """The cache of a layer.

    window         [state slots, window + DRAFTS, 1, width]: a ring of window keys per sequence. width: with a float
                   dtype, the channels of a key; with uint8, its 584 bytes
    entries        cache of the layer's compressor; None for a layer without a compressor
    index_entries  cache of the compressor of the layer's indexer; None for a layer without an indexer
    """

    window: torch.Tensor
    entries: EntryCache | None = None
    index_entries: EntryCache | None = None

    @property
    def is_fp8(self) -> bool:
        return self.window.dtype == torch.uint8


@dataclass(frozen=True)
class EntryShape:
    """The sizes of a compressor's entries. ratio: tokens per entry; dim: channels per entry; state: shape of the
    compressor's state for one sequence."""

    ratio: int
    dim: int
    state: tuple[int, int, int]


class CompressedKVCache(Cache):
    """The windows, entries and index entries of all layers. Index entries are the entries of a layer's indexer.

    In every layer, page p stores the entries of the same tokens. State slot s stores the window ring of one sequence
    and the states of the layer's compressors for this sequence.

    layers       for each layer, the shapes of its entries and of its indexer's entries; a shape is None if the layer
                 has no such entries
    num_pages    pages per layer, each for the entries of page_size tokens
    state_slots  number of state slots; a sequence needs one
    entries      storage of windows and entries: "fp8" for 584 bytes per token or entry, or a float dtype
    window       tokens that a token sees through the window, including itself
    dim          channels of a window key and of an entry
    index        storage of index entries: "fp8" for `EntryShape.dim` + 4 bytes per index entry, or a float dtype

    The constructor raises TypeError or ValueError for invalid sizes and storage kinds.
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
