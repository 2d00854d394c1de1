"""Contexts in which a model attends to all keys, or to the latest ones, instead of those that its indexers select.

Layers and indexers are found by the attributes of `dsa_layers.layers.selecting_attention.SelectingAttention`.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from dsa_layers.batch.token_batch import TokenBatch
from dsa_layers.layers.selecting_attention import SelectingAttention


def all_keys(model: nn.Module, longest: int) -> AbstractContextManager[None]:
    """Dense attention: every token reads all keys of its sequence, which has at most `longest` tokens; in DeepSeek-V4
    all compressed entries beside its window. For passes over several tokens of a sequence.

    Raises ValueError for a model without indexers.
    """
    return _changed_indexers(model, "top_k", lambda layer: max(longest, layer.indexer.top_k))


def latest_keys(model: nn.Module) -> AbstractContextManager[None]:
    """Attention to a window: every token reads the latest keys, as many as its indexer would select. In DeepSeek-V4
    these are the latest compressed entries. Indexers keep nothing in the cache.

    Raises ValueError for a model without indexers.
    """
    return _changed_indexers(model, "select", _select_latest)


@contextlib.contextmanager
def _changed_indexers(model: nn.Module, attribute: str, changed: Callable[[SelectingAttention], Any]) -> Iterator[None]:
    """A context in which an attribute of each layer's indexer is what `changed` returns for the layer."""
    # One layer per indexer: a wrapper, as of activation checkpointing or torch.compile, has the indexer of its layer.
    layers = {id(m.indexer): m for m in model.modules() if getattr(m, "indexer", None) is not None}.values()
    if not layers:
        raise ValueError(
            f"model: must have attention layers with an `indexer`, got {type(model).__name__} without such a layer"
        )
    before = [(layer.indexer, getattr(layer.indexer, attribute)) for layer in layers]
    for layer in layers:
        setattr(layer.indexer, attribute, changed(layer))
    try:
        yield
    finally:
        for indexer, value in before:
            setattr(indexer, attribute, value)


def _select_latest(layer: SelectingAttention) -> Callable[..., torch.Tensor | None]:
    """Return a function that replaces `select` of the layer's indexer. Arguments of other indexers are not read."""
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
        visible = keys.visible_keys[:, None]
        # The last top_k visible keys, ascending, then -1.
        latest = (visible - top_k).clamp(min=0) + torch.arange(top_k, dtype=torch.int32, device=visible.device)
        latest = torch.where(latest < visible, latest, -1).to(torch.int32)
        return keys.slots_of(latest) if paged_slots else latest

    return select
