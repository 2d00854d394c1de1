"""The same weights with another selection: all keys, or the latest ones, in place of those that the indexers choose."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from dsa_layers.batch.token_batch import TokenBatch
from dsa_layers.layers.attention import DSAAttention
from dsa_layers.layers.compressed_attention import CompressedAttention
from dsa_layers.layers.compressed_indexer import CompressedIndexer


@contextlib.contextmanager
def all_keys(model: nn.Module, longest: int) -> Iterator[None]:
    """Dense attention: every token reads all keys of its sequence, which has at most `longest` tokens; in DeepSeek-V4
    all compressed entries beside its window. For passes over several tokens of a sequence."""
    before = []
    for layer in _indexed(model):
        if isinstance(layer, DSAAttention):
            before.append((layer.indexer, "top_k", layer.indexer.top_k))
            layer.indexer.top_k = max(longest, layer.indexer.top_k)
        else:
            before.append((layer, "indexer", layer.indexer))
            layer.indexer = None
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


@contextlib.contextmanager
def latest_keys(model: nn.Module) -> Iterator[None]:
    """A window: every token reads as many keys as its indexer selects, but the latest ones. In DeepSeek-V4 they are the
    latest compressed entries, and passes are over several tokens of a sequence."""
    before = [(layer, layer.indexer) for layer in _indexed(model)]
    for layer, indexer in before:
        layer.indexer = _LatestKeys(indexer.top_k) if isinstance(layer, DSAAttention) else _LatestEntries(indexer)
    try:
        yield
    finally:
        for layer, indexer in before:
            layer.indexer = indexer


def _indexed(model: nn.Module) -> list[DSAAttention | CompressedAttention]:
    layers = [m for m in model.modules() if isinstance(m, DSAAttention | CompressedAttention)]
    indexed = [layer for layer in layers if layer.indexer is not None]
    if not indexed:
        raise ValueError("model: must have layers with an indexer, got none")
    return indexed


class _LatestKeys(nn.Module):
    """In a LightningIndexer's place; it keeps nothing in the cache."""

    def __init__(self, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k

    def select(
        self,
        x: torch.Tensor,
        qr: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: TokenBatch,
        cache: Any = None,
        *,
        paged_slots: bool = False,
        store_only: bool = False,
    ) -> torch.Tensor | None:
        if store_only:
            return None
        latest = _latest(batch.visible_keys, self.top_k)
        return batch.slots_of(latest) if paged_slots else latest


class _LatestEntries(nn.Module):
    """In a CompressedIndexer's place. Its compressor gives a cache its shape."""

    def __init__(self, indexer: CompressedIndexer) -> None:
        super().__init__()
        self.top_k, self.compressor = indexer.top_k, indexer.compressor

    def forward(
        self, x: torch.Tensor, qr: torch.Tensor, rope: Any, entry_rope: Any, batch: TokenBatch, cache: Any = None
    ) -> torch.Tensor:
        return _latest(batch.entries(self.compressor.ratio).visible, self.top_k)


def _latest(visible: torch.Tensor, count: int) -> torch.Tensor:
    """int32 [T, count]: the last `count` of each row's `visible` keys, ascending, then -1 where there are fewer."""
    columns = torch.arange(count, dtype=torch.int32, device=visible.device)
    keys = (visible[:, None] - count).clamp(min=0) + columns
    return torch.where(keys < visible[:, None], keys, -1).to(torch.int32)
