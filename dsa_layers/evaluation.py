"""Measure the loss on held-out text, also with dense or windowed attention, and count the keys that tokens read."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from dsa.runtime.checks import integer
from dsa_layers.batch.placement import Placement
from dsa_layers.batch.sequence_batch import Chunk, prefill_batch
from dsa_layers.batch.token_batch import TokenBatch
from dsa_layers.engine.layer_pass import LayerPass
from dsa_layers.layers.attention import DSAAttention
from dsa_layers.layers.compressed_attention import CompressedAttention
from dsa_layers.layers.pooled_indexer import PooledIndexer, tokens_of_pools
from dsa_layers.layers.window_attention import WindowAttention
from dsa_layers.models.protocols import Model


@torch.inference_mode()
def held_out_loss(model: Model, sequences: Sequence[Sequence[int]], *, chunk: int = 2048) -> float:
    """Return the mean loss, in nats per token, of predicting each token from the earlier tokens of its sequence. The
    first token of a sequence is not predicted.

    sequences  at least one sequence of token ids, each of at least two tokens
    chunk      the maximum number of tokens per pass
    """
    losses = [
        cross_entropy(logits, targets, reduction="sum") for logits, targets in predictions(model, sequences, chunk)
    ]
    return torch.stack(losses).double().sum().item() / sum(len(tokens) - 1 for tokens in sequences)


@torch.inference_mode()
def predictions(
    model: Model, sequences: Sequence[Sequence[int]], chunk: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the logits [T, vocab_size] and the targets [T] of the T tokens of each pass.

    The inputs of a sequence are all its tokens except the last, split into parts of at most `chunk` tokens. Each part
    is one pass with a paged cache.
    """
    device, page_size = next(model.parameters()).device, model.page_size
    pages = range(-(-max(map(len, sequences)) // page_size))
    cache = model.make_cache(len(pages), page_size, device, state_slots=1)
    for tokens in sequences:
        text = torch.tensor(tokens, device=device)
        # Avoid parts of one token, because they run as decoding passes. Parts have nearly equal lengths, so there is a
        # part of one token only if `chunk` is 1 or 2, or if the sequence has two tokens.
        parts = -(-(len(tokens) - 1) // chunk)
        done = 0
        for inputs, targets in zip(text[:-1].tensor_split(parts), text[1:].tensor_split(parts)):
            batch = prefill_batch([Chunk(len(inputs), done, pages, 0)], page_size, device)
            done += len(inputs)
            yield model(inputs, batch, cache, all_tokens=True), targets


@dataclass(frozen=True)
class KeyCounts:
    """Numbers of keys per token and layer, averaged over all tokens of a sequence and all layers that `keys_read`
    counts.

    read     keys that a token's attention reads
    dense    keys that dense attention over the same cache would read
    context  tokens that a token can see, including itself

    In DeepSeek-V4 the keys are a window of tokens and compressed entries. In other models the keys are tokens.
    """

    read: float
    dense: float
    context: float

    @property
    def share(self) -> float:
        """The number of keys read, as a fraction of the keys that dense attention reads."""
        return self.read / self.dense


def keys_read(model: nn.Module, length: int) -> KeyCounts:
    """Return the numbers of keys that the tokens of a sequence of `length` tokens read. No pass runs.

    A token reads at most `top_k` of the keys that it sees, or the window in a `WindowAttention` layer. With a
    `PooledIndexer` it also reads the tokens after the last complete pool. In DeepSeek-V4 it reads its window and at
    most `top_k` compressed entries, or all entries in a layer without an indexer. Layers of a `drafter` and layers with
    Kimi delta attention do not count.
    Raises ValueError for a model without attention layers of `dsa_layers`.
    """
    visible = torch.arange(1, integer("length", length, at_least=1) + 1)
    read, dense, top_k = [], [], length
    for name, layer in model.named_modules():
        if name.startswith("drafter."):
            continue
        if isinstance(layer, WindowAttention):
            window = visible.clamp(max=layer.window)
            read.append(window)
            dense.append(window)
        elif isinstance(layer, DSAAttention):
            if layer.indexer is not None:  # a layer without an indexer reads the same keys as the layer before it
                top_k = layer.indexer.top_k
            if isinstance(layer.indexer, PooledIndexer):
                after = visible % layer.indexer.pool  # tokens after the last complete pool
                read.append((visible - after).clamp(max=top_k) + after)
            else:
                read.append(visible.clamp(max=top_k))
            dense.append(visible)
        elif isinstance(layer, CompressedAttention):
            window = visible.clamp(max=layer.window)
            entries = 0 * visible if layer.compressor is None else visible // layer.compressor.ratio
            selected = entries if layer.indexer is None else entries.clamp(max=layer.indexer.top_k)
            read.append(window + selected)
            dense.append(window + entries)
    if not read:
        raise ValueError(f"model: must have attention layers of dsa_layers, got {type(model).__name__} without one")
    of_layers = (torch.stack(counts).double().mean().item() for counts in (read, dense))
    return KeyCounts(*of_layers, (length + 1) / 2)


def all_keys(model: nn.Module, longest: int) -> AbstractContextManager[None]:
    """Return a context manager for dense attention: every token reads all keys that it sees. In DeepSeek-V4 these are
    the window and all compressed entries.

    longest  the maximum number of tokens per sequence

    It is meant for prefill. The model's attention layers may be of any class with an attribute `indexer`, which is an
    `Indexer` or None. Raises ValueError for a model without indexers.
    """
    return _changed_indexers(model, lambda layer: ("top_k", max(longest, layer.indexer.top_k)))


def latest_keys(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context manager for sliding-window attention: every token reads the latest `top_k` keys that it sees. In
    DeepSeek-V4 it reads its window and the latest `top_k` compressed entries.

    The model's attention layers may be of any class with the attribute `indexer`, as for `all_keys`, and the method
    `selectable(batch)`, which returns the keys among which the indexer selects.
    Raises ValueError for a model without indexers.
    """
    return _changed_indexers(model, _latest)


@contextlib.contextmanager
def _changed_indexers(model: nn.Module, change: Callable[[Any], tuple[str, Any]]) -> Iterator[None]:
    """Replace one attribute of each layer's indexer inside a `with` block, and restore it afterwards.

    change: a function from a layer to (attribute's name, temporary value)
    """
    # Keep one layer per indexer, because a wrapper module, for example of activation checkpointing, forwards its
    # layer's attributes.
    layers = {id(m.indexer): m for m in model.modules() if getattr(m, "indexer", None) is not None}.values()
    if not layers:
        raise ValueError(
            f"model: must have attention layers with an `indexer`, got {type(model).__name__} without such a layer"
        )
    with contextlib.ExitStack() as replaced:
        for layer in layers:
            replaced.enter_context(patch.object(layer.indexer, *change(layer)))
        yield


def _latest(layer: Any) -> tuple[str, Callable[..., torch.Tensor]]:
    """Return (name of the indexer's selection method, a function that selects the latest keys instead). The method is
    `pick` in an indexer that `fuse` has converted, else `select`."""
    indexer = layer.indexer
    pooled = isinstance(indexer, PooledIndexer)
    top_k, selectable = (indexer.selects, indexer.selectable) if pooled else (indexer.top_k, layer.selectable)

    def latest(batch: TokenBatch, in_slots: bool) -> torch.Tensor:
        """Return the last top_k visible keys of each token in ascending order, padded with -1. A key is given as a
        cache slot if `in_slots`, else as a position."""
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
        found = latest(batch, False)
        return tokens_of_pools(found, batch.visible_keys, indexer.pool) if pooled else found

    return ("pick", pick) if hasattr(indexer, "pick") else ("select", select)
