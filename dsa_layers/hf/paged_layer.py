"""The paged cache of one attention layer, with the interface of transformers' cache layers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin


@dataclass(frozen=True)
class Storage:
    """The tensors that a layer caches.

    page_size    the number of tokens per page
    pages        {name: (tokens per row, elements per row, dtype)} of paged tensors
    by_sequence  {name: (shape per sequence, dtype)} of tensors whose size does not depend on the number of tokens
    """

    page_size: int
    pages: Mapping[str, tuple[int, int, torch.dtype]] = field(default_factory=dict)
    by_sequence: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)


class PagedLayer(CacheLayerMixin):
    """The pages of all sequences of a batch. Every sequence has `pages_each` pages, and sequence b has the pages
    b * pages_each, ..., (b + 1) * pages_each - 1.

    lens  the number of stored tokens of each sequence, without padding
    seen  the number of rows per sequence in all passes so far, including padding; transformers uses it as the cache's
          length

    New memory is not cleared, because the contents of unused slots never reach a result.
    """

    is_sliding = False

    def __init__(self, storage: Storage, batch_size: int, device: torch.device) -> None:
        super().__init__()
        self.page_size, self.device, self._storage = storage.page_size, device, storage
        self._begin(batch_size)

    def _begin(self, batch_size: int) -> None:
        self.lens, self.seen, self.pages_each = [0] * batch_size, 0, 0
        self._tensors = {
            name: torch.empty(batch_size, *shape, dtype=dtype, device=self.device)
            for name, (shape, dtype) in self._storage.by_sequence.items()
        }

    def reserve(self, new: Sequence[int]) -> None:
        """Make room for `new` more tokens of each sequence. The number of pages grows geometrically, because adding
        pages copies all pages."""
        most = max(held + more for held, more in zip(self.lens, new))
        needed = -(-most // self.page_size)
        if needed <= self.pages_each:
            return
        pages = max(needed + 1, self.pages_each * 5 // 4)
        for name, (ratio, width, dtype) in self._storage.pages.items():
            shape = len(self.lens), pages, self.page_size // ratio, 1, width
            grown = torch.empty(shape, dtype=dtype, device=self.device)
            if self.pages_each:
                grown[:, : self.pages_each] = self._tensors[name]
            self._tensors[name] = grown
        self.pages_each = pages

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return the tensor `name`: [pages, rows, 1, D] if it is paged, else [sequences, ...]."""
        tensor = self._tensors[name]
        return tensor.flatten(0, 1) if name in self._storage.pages else tensor

    def block_table(self, sequences: Sequence[int], device: torch.device) -> torch.Tensor:
        """Return the page numbers of `sequences`, int32 [len(sequences), pages_each]."""
        every = torch.arange(len(self.lens) * self.pages_each, dtype=torch.int32, device=device)
        table = every.view(len(self.lens), self.pages_each)
        return table if len(sequences) == len(table) else table[list(sequences)]

    def advance(self, new: Sequence[int], rows: int) -> None:
        """Record that a pass has stored `new` tokens of each sequence. rows: rows per sequence, including padding."""
        self.lens = [held + more for held, more in zip(self.lens, new)]
        self.seen += rows

    def leave_out(self, rows: int) -> None:
        """Add the rows of a pass with gradients to `seen`. Such a pass stores no tokens in the cache, which
        transformers creates by default even if no later pass reads it. Raise ValueError if there are earlier rows,
        because gradients would not reach them."""
        if self.seen:
            raise ValueError(
                "cache: gradients do not reach earlier tokens; pass use_cache=False, or generate under torch.no_grad()"
            )
        self.seen += rows

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def reset(self) -> None:
        self._begin(len(self.lens))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.lens = [self.lens[b] for b in beam_idx.tolist()]
        rows = beam_idx.to(self.device)
        self._tensors = {name: tensor[rows] for name, tensor in self._tensors.items()}

    def lazy_initialization(self, *states: torch.Tensor, **options: Any) -> None:
        raise NotImplementedError("cache: holds pages of dsa_layers.hf, which other layers cannot fill")

    update = lazy_initialization


def layer_of(cache: Any, index: int, storage: Storage, x: torch.Tensor) -> PagedLayer:
    """Return layer `index` of transformers' cache for a pass over x [B, S, D]. If this layer is missing, or is an empty
    layer of transformers, create a `PagedLayer` there. Raise ValueError if the cache is not usable for this pass."""
    if not isinstance(cache, DynamicCache) or cache.offloading:
        kind = type(cache).__name__ + " with offloading" * isinstance(cache, DynamicCache)
        raise ValueError(
            "cache: must be a DynamicCache without offloading, which `generate` makes if cache_implementation is not "
            f"set, got {kind}"
        )
    layers = cache.layers
    if index == len(layers):
        layers.append(PagedLayer(storage, len(x), x.device))
    layer = layers[index]
    if not isinstance(layer, PagedLayer):
        if layer.get_seq_length():
            raise ValueError(
                f"cache: layer {index} holds {layer.get_seq_length()} tokens of transformers' own attention; "
                "accepted: a cache that is empty or that these layers have filled"
            )
        layer = layers[index] = PagedLayer(storage, len(x), x.device)
    if len(layer.lens) != len(x):
        raise ValueError(f"cache: holds {len(layer.lens)} sequences, got a batch of {len(x)}")
    return layer
