"""Contexts in which a model attends to all keys, or to the latest ones, in place of those that its indexers select.

Layers and indexers are found by the attributes of `dsa_layers.layers.selecting_attention.SelectingAttention`.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from dsa_layers.batch.token_batch import TokenBatch
from dsa_layers.engine.layer_pass import LayerPass
from dsa_layers.layers.selecting_attention import SelectingAttention, selecting_method


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
    these are the latest compressed entries.

    Raises ValueError for a model without indexers, and for one that lacks an attribute.
    """
    layers = _indexed(model)
    methods = [(layer.indexer, selecting_method(layer.indexer)) for layer in layers]
    before = [vars(indexer).get(name) for indexer, name in methods]
    for layer, (indexer, name) in zip(layers, methods):
        setattr(indexer, name, _pick_latest(layer) if name == "pick" else _select_latest(layer))
    try:
        yield
    finally:
        for (indexer, name), own in zip(methods, before):
            if own is None:
                delattr(indexer, name)  # its class' method is there again
            else:
                setattr(indexer, name, own)


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


def _pick_latest(layer: SelectingAttention) -> Callable[..., torch.Tensor]:
    """What takes the place of the `pick` of the layer's indexer."""
    top_k, selectable = layer.indexer.top_k, layer.selectable

    def pick(queries: torch.Tensor, keys: Any, weights: torch.Tensor, step: LayerPass, *rest: Any) -> torch.Tensor:
        *_, rows = rest  # DeepSeek-V4's `pick` takes a cache before the rows
        selected_among = selectable(step.batch)
        latest = _latest(selected_among.visible_keys, top_k)
        return rows.own(selected_among.slots_of(latest) if step.in_pages else latest)

    return pick


def _latest(visible: torch.Tensor, count: int) -> torch.Tensor:
    """int32 [T, count]: the last `count` of each row's `visible` keys, ascending, then -1 where there are fewer."""
    columns = torch.arange(count, dtype=torch.int32, device=visible.device)
    keys = (visible[:, None] - count).clamp(min=0) + columns
    return torch.where(keys < visible[:, None], keys, -1).to(torch.int32)
