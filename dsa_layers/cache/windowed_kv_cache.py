"""The paged cache of a model in which some layers attend to a sliding window."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dsa.runtime.checks import integer, shown
from dsa_layers.cache.drafts import DRAFTS
from dsa_layers.cache.kv_cache import LayerCache, PagedKVCache, check_storage


@dataclass(frozen=True)
class RingCache:
    """The cache of a layer with a window.

    ring  [state slots, window + DRAFTS, 1, latent + rope] in a float dtype: for each sequence, the keys of its latest
          tokens (`WindowView`)
    """

    ring: torch.Tensor


class WindowedKVCache(PagedKVCache):
    """`PagedKVCache` for the layers without a window, and a ring of keys per sequence for each layer with a window.

    window_layers  the layers with a window, in ascending order, among all `num_layers` layers
    window         tokens that a token sees in these layers, including itself
    window_dim     channels of a latent and its rope key together in these layers
    window_dtype   a float dtype, the storage of the rings
    state_slots    number of state slots; a sequence needs one
    options        arguments of `PagedKVCache`, for the layers without a window

    The constructor raises TypeError or ValueError for invalid sizes and storage kinds.
    """

    def __init__(
        self,
        num_layers: int,
        window_layers: Sequence[int],
        *,
        window: int,
        window_dim: int,
        window_dtype: torch.dtype,
        state_slots: int = 64,
        device: torch.device | str = "cpu",
        **options: Any,
    ) -> None:
        integer("window", window, at_least=1)
        integer("window_dim", window_dim, at_least=1)
        if sorted(set(window_layers) & {*range(num_layers)}) != [*window_layers]:
            told = f"window_layers: must be different layers below {num_layers} in ascending order"
            raise ValueError(f"{told}, got {shown(window_layers)}")
        if not isinstance(window_dtype, torch.dtype):
            raise TypeError(f"window_dtype: must be a torch.dtype, got {shown(window_dtype)}")
        others = [i for i in range(num_layers) if i not in set(window_layers)]
        super().__init__(len(others), state_slots=state_slots, device=device, **options)
        check_storage("window_dtype", window_dtype)
        self._rows = {layer: row for layers in (window_layers, others) for row, layer in enumerate(layers)}
        self._windowed = frozenset(window_layers)
        shape = state_slots, window + DRAFTS, 1, window_dim
        self._rings = [torch.empty(shape, dtype=window_dtype, device=device) for _ in window_layers]

    def layer(self, i: int) -> LayerCache | RingCache:
        row = self._rows[i]
        return RingCache(self._rings[row]) if i in self._windowed else super().layer(row)

    def tensors(self) -> list[torch.Tensor]:
        return [*super().tensors(), *self.state_tensors()]

    def state_tensors(self) -> list[torch.Tensor]:
        return [*self._rings]
