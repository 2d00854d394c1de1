"""Contexts in which a model attends to all keys, or to the latest ones, in place of those that its indexers select.

Layers and indexers are found by the attributes of `dsa_layers.layers.selecting_attention.SelectingAttention`.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from dsa_layers.batch.token_batch import TokenBatch
from dsa_layers.layers.selecting_attention import SelectingAttention


@contextlib.contextmanager
def all_keys(model: nn.Module, longest: int) -> Iterator[None]:
    """Dense attention: every token reads all keys of its sequence, which has at most `longest` tokens; in DeepSeek-V4
    all compressed entries beside its window. For passes over several tokens of a sequence.

    Raises ValueError for a model without indexers, and for one that lacks an attribute.
    """
    before = [(layer.indexer, layer.indexer.top_k) for layer in _indexed(model)]
    for indexer, top_k in before:
        indexer.top_k = max(longest, top_k)
    try:
        yield
    finally:
        for indexer, top_k in before:
            indexer.top_k = top_k


@contextlib.contextmanager
def latest_keys(model: nn.Module) -> Iterator[None]:
    """Attention to a window: every token reads the latest keys, as many as its indexer would select. In DeepSeek-V4
    these are the latest compressed entries. Indexers keep nothing in the cache.

    Raises ValueError for a model without indexers, and for one that lacks an attribute.
    """
    layers = _indexed(model)
    before = [(layer.indexer, vars(layer.indexer).get("select")) for layer in layers]
    for layer in layers:
        layer.indexer.select = _select_latest(layer)
    try:
        yield
    finally:
        for indexer, own in before:
            if own is None:
                del indexer.select  # its class' method is there again
            else:
                indexer.select = own


def _indexed(model: nn.Module) -> list[SelectingAttention]:
    found = [m for m in model.modules() if getattr(m, "indexer", None) is not None]
    # One of each indexer: a wrapper, as of activation checkpointing or torch.compile, hands out that of its layer.
    layers = list({id(layer.indexer): layer for layer in found}.values())
    if not layers:
        raise ValueError(
            f"model: must have attention layers with an `indexer`, got {type(model).__name__} without such a layer"
        )
    for layer in layers:
        for owner, names in ((layer, ("selectable",)), (layer.indexer, ("top_k", "select"))):
            if missing := [name for name in names if not hasattr(owner, name)]:
                raise ValueError(
                    f"model: its {type(owner).__name__} lacks {' and '.join(f'`{name}`' for name in missing)} of "
                    "dsa_layers.layers.selecting_attention"
                )
    return layers


def _select_latest(layer: SelectingAttention) -> Callable[..., torch.Tensor | None]:
    """What takes the place of the `select` of the layer's indexer. An indexer's further arguments are not read."""
    top_k, selectable = layer.indexer.top_k, layer.selectable

    def select(
        x: torch.Tensor,
        qr: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: TokenBatch,
        cache: Any = None,
        *,
        paged_slots: bool = False,
        store_only: bool = False,
        **_: Any,
    ) -> torch.Tensor | None:
        if store_only:
            return None
        keys = selectable(batch)
        latest = _latest(keys.visible_keys, top_k)
        return keys.slots_of(latest) if paged_slots else latest

    return select


def _latest(visible: torch.Tensor, count: int) -> torch.Tensor:
    """int32 [T, count]: the last `count` of each row's `visible` keys, ascending, then -1 where there are fewer."""
    columns = torch.arange(count, dtype=torch.int32, device=visible.device)
    keys = (visible[:, None] - count).clamp(min=0) + columns
    return torch.where(keys < visible[:, None], keys, -1).to(torch.int32)
