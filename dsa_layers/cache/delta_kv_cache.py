"""The paged cache of a model with Kimi delta attention and pooled index keys: GLM-5.3-Flash."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dsa.runtime.checks import integer, shown
from dsa_layers.cache.drafts import DRAFTS
from dsa_layers.cache.kv_cache import LayerCache, PagedKVCache, check_storage


@dataclass(frozen=True)
class DeltaCache:
    """The cache of a layer with Kimi delta attention.

    inputs  [state slots, conv_width + DRAFTS, 1, channels] in a float dtype: for each sequence a ring of the
            convolution's inputs for its latest tokens (`WindowView`)
    states  fp32 [state slots, drafts + 2, heads, dim, dim]: for each sequence, the latest states S (`StateView`)
    """

    inputs: torch.Tensor
    states: torch.Tensor


@dataclass(frozen=True)
class PooledLayerCache(LayerCache):
    """The cache of a layer with a `PooledIndexer`. `index` has one key per pool of tokens.

    pool_inputs  [state slots, pool + DRAFTS, 1, 2 * index_dim] in a float dtype: for each sequence a ring of
                 `PooledIndexer.pooled_inputs` of its latest tokens
    """

    pool_inputs: torch.Tensor


@dataclass(frozen=True)
class DeltaShape:
    """The sizes of a `DeltaCache`. channels: number of channels of the convolution's inputs."""

    conv_width: int
    channels: int
    heads: int
    dim: int


class DeltaKVCache(PagedKVCache):
    """The latent and index pages of the layers with an indexer, and states per sequence.

    deltas       for each layer, the sizes of its `DeltaCache`; None for a layer with an indexer
    pool         tokens per index key
    drafts       the largest number of draft tokens in a decoding pass, up to DRAFTS. The cache keeps the states after
                 the latest drafts + 2 tokens of decoding passes, because drafts can be rejected, and because a decoding
                 pass must not overwrite the state that it begins with: the first pass of a CUDA graph runs twice
    dtype        a float dtype, the storage of the rings
    state_slots  number of state slots; a sequence needs one
    options      further arguments of `PagedKVCache`, for the layers with an indexer

    The constructor raises TypeError or ValueError for invalid sizes and storage kinds.
    """

    def __init__(
        self,
        deltas: Sequence[DeltaShape | None],
        *,
        pool: int,
        drafts: int,
        dtype: torch.dtype,
        page_size: int,
        index_dim: int = 128,
        state_slots: int = 64,
        device: torch.device | str = "cpu",
        **options: Any,
    ) -> None:
        integer("pool", pool, at_least=1)
        kept = integer("drafts", drafts, at_least=0, at_most=DRAFTS) + 2
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype: must be a torch.dtype, got {shown(dtype)}")
        check_storage("dtype", dtype)
        indexed = [i for i, shape in enumerate(deltas) if shape is None]
        super().__init__(
            len(indexed),
            page_size=page_size,
            tokens_per_index_key=pool,
            index_dim=index_dim,
            state_slots=state_slots,
            device=device,
            **options,
        )
        self._indexed = {layer: row for row, layer in enumerate(indexed)}
        ring = state_slots, pool + DRAFTS, 1, 2 * index_dim
        self._pool_inputs = [torch.empty(ring, dtype=dtype, device=device) for _ in indexed]
        self._deltas = {
            layer: DeltaCache(
                torch.empty(state_slots, shape.conv_width + DRAFTS, 1, shape.channels, dtype=dtype, device=device),
                torch.empty(state_slots, kept, shape.heads, shape.dim, shape.dim, dtype=torch.float32, device=device),
            )
            for layer, shape in enumerate(deltas)
            if shape is not None
        }

    def layer(self, i: int) -> DeltaCache | PooledLayerCache:
        if i in self._deltas:
            return self._deltas[i]
        row = self._indexed[i]
        pages = super().layer(row)
        return PooledLayerCache(pages.latent, pages.index, self._pool_inputs[row])

    def tensors(self) -> list[torch.Tensor]:
        return [*super().tensors(), *self.state_tensors()]

    def state_tensors(self) -> list[torch.Tensor]:
        of_deltas = [tensor for delta in self._deltas.values() for tensor in (delta.inputs, delta.states)]
        return [*self._pool_inputs, *of_deltas]
