"""The paged cache of latents and index keys."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from dsa_layers.cache.cache import Cache, check_storage
from dsa_layers.cache.cache import OutOfPages as OutOfPages

LATENT_FP8_BYTES = 656


@dataclass(frozen=True)
class LayerCache:
    """The cache pages of one layer. P: tokens per page.

    latent  [pages, P, 1, 576] in a float dtype: latent | rope key; or uint8 [pages, P, 1, 656]: e4m3 latents with fp32
            scales, and rope keys
    index   [pages, P, 1, 128] in a float dtype: index keys; or uint8 [pages, P, 1, 132]: e4m3 index keys and fp32
            scales; None for a layer without an indexer
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


class PagedKVCache(Cache):
    """Latent and index pages of all layers. All data is in pages; sequences have no other state.

    latent, index  storage of latents and index keys: "fp8" for the byte layouts of LayerCache, or a float dtype
    index_layers   layers that have index pages; None means all layers
    state_slots    maximum number of sequences at a time

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
        device: torch.device | str = "cpu",
        state_slots: int = 64,
    ) -> None:
        super().__init__(num_pages, page_size, state_slots)
        check_storage("latent", latent)
        check_storage("index", index)
        if latent == "fp8" and latent_dim != 576:
            raise ValueError(f"latent_dim: must be 576 (512 and 64 rope) for the FP8 layout, got {latent_dim}")
        index_layers = range(num_layers) if index_layers is None else index_layers
        self._index_rows = {layer: row for row, layer in enumerate(index_layers)}

        def pages(layers: int, kind: torch.dtype | str, width: int, fp8_bytes: int) -> torch.Tensor:
            dtype, width = (torch.uint8, fp8_bytes) if kind == "fp8" else (kind, width)
            return torch.empty(layers, num_pages, page_size, 1, width, dtype=dtype, device=device)

        self._latent = pages(num_layers, latent, latent_dim, LATENT_FP8_BYTES)
        self._index = pages(len(index_layers), index, index_dim, index_dim + 4)

    def layer(self, i: int) -> LayerCache:
        row = self._index_rows.get(i)
        return LayerCache(self._latent[i], None if row is None else self._index[row])

    def tensors(self) -> list[torch.Tensor]:
        return [self._latent, self._index]
