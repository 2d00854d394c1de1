"""What an attention layer keeps of earlier tokens, behind the interface of transformers' caches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin

# The name of the cache among a model's arguments and results, which transformers 5.24 changed.
CACHE = "cache" if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24) else "past_key_values"


@dataclass(frozen=True)
class Storage:
    """The tensors of a layer.

    page_size    tokens a page
    pages        name -> (tokens of a row, numbers of a row, dtype), of what there is more of with every token
    by_sequence  name -> (shape, dtype), of what each sequence has once
    """

    page_size: int
    pages: Mapping[str, tuple[int, int, torch.dtype]] = field(default_factory=dict)
    by_sequence: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)


class PagedLayer(CacheLayerMixin):
    """Pages of all sequences of a batch, as many for each; sequence b has pages b * pages_each and those behind it.

    lens              of each sequence, how many tokens are stored: those that are no padding
    seen              rows of the batch that passes have had, padding among them: transformers' length of the cache
    position_offsets  of each sequence, by how much its positions are above its tokens' numbers
    Memory is not cleared: what an unused slot holds never reaches a result.
    """

    is_sliding = False

    def __init__(self, storage: Storage, batch_size: int, device: torch.device) -> None:
        super().__init__()
        self.page_size, self.device, self._storage = storage.page_size, device, storage
        self._begin(batch_size)

    def _begin(self, batch_size: int) -> None:
        self.lens, self.position_offsets, self.seen = [0] * batch_size, [0] * batch_size, 0
        self.pages_each, self.without_tokens = 0, False
        self._tensors = {
            name: torch.empty(batch_size, *shape, dtype=dtype, device=self.device)
            for name, (shape, dtype) in self._storage.by_sequence.items()
        }

    def reserve(self, new: Sequence[int]) -> None:
        """Room for so many more tokens of each sequence. Pages are moved when they get more, which is seldom."""
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
        """A tensor as ops take it: pages [pages, P, 1, D] of all sequences, or [sequences, ...]."""
        tensor = self._tensors[name]
        return tensor.flatten(0, 1) if name in self._storage.pages else tensor

    def block_table(self, sequences: Sequence[int], device: torch.device) -> torch.Tensor:
        """int32 [len(sequences), pages_each]."""
        every = torch.arange(len(self.lens) * self.pages_each, dtype=torch.int32, device=device)
        table = every.view(len(self.lens), self.pages_each)
        return table if len(sequences) == len(table) else table[list(sequences)]

    def advance(self, new: Sequence[int], rows: int, position_offsets: Sequence[int]) -> None:
        """So many tokens of each sequence have been stored, in a pass over so many rows."""
        offsets = zip(self.position_offsets, position_offsets, new)
        self.position_offsets = [now if more else was for was, now, more in offsets]
        self.lens = [held + more for held, more in zip(self.lens, new)]
        self.seen += rows

    def leave_out(self, rows: int) -> None:
        """A pass with gradients over so many rows, as transformers makes it with a cache that nobody may want: nothing
        is stored. ValueError if there are earlier tokens, which gradients would not reach."""
        if self.seen:
            raise ValueError(
                f"{CACHE}: gradients do not reach earlier tokens; pass use_cache=False, or generate under "
                "torch.no_grad()"
            )
        self.without_tokens = True
        self.seen += rows

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name until transformers 5.17

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def reset(self) -> None:
        self._begin(len(self.lens))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(len(self.lens)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        chosen = torch.arange(len(self.lens))[indices.cpu()].tolist()
        self.lens = [self.lens[b] for b in chosen]
        self.position_offsets = [self.position_offsets[b] for b in chosen]
        rows = torch.tensor(chosen, device=self.device)
        self._tensors = {name: tensor[rows] for name, tensor in self._tensors.items()}

    def crop(self, *lengths: Any, **options: Any) -> None:
        raise NotImplementedError(
            f"{CACHE}: the layers of dsa_layers.hf forget no tokens, which assisted decoding, prompt lookup and "
            "`crop` ask for; generate without assistant_model and prompt_lookup_num_tokens"
        )

    def offload(self) -> None:
        raise NotImplementedError(f"{CACHE}: the layers of dsa_layers.hf stay on their device; use no offloading")

    prefetch = offload

    def lazy_initialization(self, *states: torch.Tensor, **options: Any) -> None:
        raise NotImplementedError(f"{CACHE}: holds pages of dsa_layers.hf, which other layers cannot fill")

    update = lazy_initialization


def cache_of(cache: Any, options: Mapping[str, Any]) -> Any:
    """The cache of an attention layer's call. transformers gives it as `cache`, before 5.24 as `past_key_values`."""
    return cache if cache is not None else options.get("past_key_values")


def layer_of(cache: Any, index: int, storage: Storage, x: torch.Tensor) -> PagedLayer:
    """Our layer `index` of transformers' cache, which takes the place of its empty one, for a pass over x [B, S, D]."""
    if not isinstance(cache, DynamicCache) or cache.offloading:
        kind = type(cache).__name__ + " with offloading" * isinstance(cache, DynamicCache)
        raise ValueError(
            f"{CACHE}: must be a DynamicCache without offloading, which `generate` makes if "
            f"cache_implementation is not set, got {kind}"
        )
    layers, batch_size, device = cache.layers, len(x), x.device
    if index < len(layers) and not isinstance(layers[index], PagedLayer) and layers[index].get_seq_length():
        raise ValueError(
            f"{CACHE}: layer {index} holds {layers[index].get_seq_length()} tokens of transformers' own "
            "attention; accepted: a cache that is empty or that these layers have filled"
        )
    if index > len(layers):
        raise ValueError(f"{CACHE}: must have layers in their order, got layer {index} after {len(layers)}")
    if index == len(layers):
        layers.append(PagedLayer(storage, batch_size, device))
    elif not isinstance(layers[index], PagedLayer):
        layers[index] = PagedLayer(storage, batch_size, device)
    layer = layers[index]
    if len(layer.lens) != batch_size:
        raise ValueError(f"{CACHE}: holds {len(layer.lens)} sequences, got a batch of {batch_size}")
    if layer.without_tokens:
        raise ValueError(
            f"{CACHE}: comes from a pass with gradients, which keeps no tokens; make the first pass, too, under "
            "torch.no_grad()"
        )
    return layer
