"""Contexts in which a model attends to all keys, or to the latest ones, instead of those that its indexers select.

Layers and indexers are found by the attributes of `dsa_layers.layers.selecting_attention.SelectingAttention`.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from dsa_layers.batch.placement import Placement
from dsa_layers.batch.token_batch import TokenBatch
from dsa_layers.engine.layer_pass import LayerPass
from dsa_layers.layers.selecting_attention import SelectingAttention, selecting_method


def all_keys(model: nn.Module, longest: int) -> AbstractContextManager[None]:
    """Dense attention: every token reads all keys of its sequence, which has at most `longest` tokens; in DeepSeek-V4
    all compressed entries beside its window. For passes over several tokens of a sequence.

    Raises ValueError for a model without indexers.
    """
    return _changed_indexers(model, "top_k", lambda layer: max(longest, layer.indexer.top_k))


def latest_keys(model: nn.Module) -> AbstractContextManager[None]:
    """Attention to a window: every token reads the latest keys, as many as its indexer would select. In DeepSeek-V4
    these are the latest compressed entries.

    Raises ValueError for a model without indexers.
    """
    return _changed_indexers(model, None, _latest)


@contextlib.contextmanager
def _changed_indexers(
    model: nn.Module, attribute: str | None, changed: Callable[[SelectingAttention], Any]
) -> Iterator[None]:
    """A context in which an attribute of each layer's indexer is what `changed` returns for the layer. attribute: None
    for the method that selects."""
    # One layer per indexer: a wrapper, as of activation checkpointing or torch.compile, has the indexer of its layer.
    layers = {id(m.indexer): m for m in model.modules() if getattr(m, "indexer", None) is not None}.values()
    if not layers:
        raise ValueError(
            f"model: must have attention layers with an `indexer`, got {type(model).__name__} without such a layer"
        )
    places = [(layer.indexer, attribute or selecting_method(layer.indexer)) for layer in layers]
    before = [{name: vars(indexer)[name]} if name in vars(indexer) else {} for indexer, name in places]
    for layer, (indexer, name) in zip(layers, places):
        setattr(indexer, name, changed(layer))
    try:
        yield
    finally:
        for (indexer, name), value in zip(places, before):
            delattr(indexer, name)  # a method of the class is there again
            vars(indexer).update(value)


def _latest(layer: SelectingAttention) -> Callable[..., torch.Tensor | None]:
    """Return a function that replaces the selecting method of the layer's indexer. Arguments of other indexers are not
    read."""
    top_k, selectable = layer.indexer.top_k, layer.selectable

    def latest(batch: TokenBatch, in_slots: bool) -> torch.Tensor:
        """The last top_k visible keys, ascending, then -1."""
        keys = selectable(batch)
        visible = keys.visible_keys[:, None]
        found = (visible - top_k).clamp(min=0) + torch.arange(top_k, dtype=torch.int32, device=visible.device)
        found = torch.where(found < visible, found, -1).to(torch.int32)
        return keys.slots_of(found) if in_slots else found

    def pick(
        queries: torch.Tensor, keys: Any, weights: torch.Tensor, step: LayerPass, placement: Placement
    ) -> torch.Tensor:
        return placement.local(latest(step.batch, step.in_pages))

    def select(
        x: torch.Tensor, qr: torch.Tensor, rope: Any, batch: TokenBatch, cache: Any = None, **_: Any
    ) -> torch.Tensor:
        return latest(batch, False)

    return pick if selecting_method(layer.indexer) == "pick" else select
