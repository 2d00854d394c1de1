"""Loss on held-out text, the keys that tokens read, and other selections of keys with the same weights."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from dsa_layers.batch.placement import Placement
from dsa_layers.batch.selectable_keys import SelectableKeys
from dsa_layers.batch.sequence_batch import Chunk, prefill_batch
from dsa_layers.batch.token_batch import TokenBatch
from dsa_layers.engine.layer_pass import KeyCounter, LayerPass
from dsa_layers.layers.indexer import Indexer
from dsa_layers.models.protocols import Model


class SelectingAttention(Protocol):
    """An attention layer, as `KeysRead`, `all_keys` and `latest_keys` of `dsa_layers.evaluation` need it.

    key_counter  None but while keys are counted; the layer then calls its `add` once a pass
    indexer      has `top_k` and `select`, as `Indexer` says. None: the layer's tokens read all keys, or those that
                 another layer selected. Tokens that see no more than `top_k` keys read all of them
    """

    indexer: Indexer | None
    key_counter: KeyCounter | None

    def selectable(self, batch: TokenBatch) -> SelectableKeys:
        """The keys among which the indexer selects in a pass over `batch`: tokens, or compressed entries."""


@torch.inference_mode()
def held_out_loss(model: Model, sequences: Sequence[Sequence[int]], *, chunk: int = 2048) -> float:
    """Return the mean loss, in nats, of predicting each token of the sequences, except the first, from the tokens
    before it.

    sequences  at least one, each of at least two tokens
    chunk      the most tokens of a pass
    """
    losses = [
        cross_entropy(logits, targets, reduction="sum") for logits, targets in predictions(model, sequences, chunk)
    ]
    return torch.stack(losses).double().sum().item() / sum(len(tokens) - 1 for tokens in sequences)


@torch.inference_mode()
def predictions(
    model: Model, sequences: Sequence[Sequence[int]], chunk: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the logits [T, vocab_size] and the targets [T] of each pass: all tokens of a sequence except the last, in
    parts of at most `chunk` tokens, sequence by sequence. Passes use a paged cache, as those of generation do."""
    device, page_size = next(model.parameters()).device, model.page_size
    pages = range(-(-max(map(len, sequences)) // page_size))
    cache = model.make_cache(len(pages), page_size, device, state_slots=1)
    for tokens in sequences:
        text = torch.tensor(tokens, device=device)
        # Parts of equal length: a part of one token, which would be a decoding pass, needs a chunk of 1 or 2.
        parts = -(-(len(tokens) - 1) // chunk)
        done = 0
        for inputs, targets in zip(text[:-1].tensor_split(parts), text[1:].tensor_split(parts)):
            batch = prefill_batch([Chunk(len(inputs), done, pages, 0)], page_size, device)
            done += len(inputs)
            yield model(inputs, batch, cache, all_tokens=True), targets


@dataclass(frozen=True)
class KeyCounts:
    """Averages over all tokens of all passes and over layers, and the largest value of each.

    read     keys that a token's attention read
    dense    keys that dense attention over the same cache would have read
    context  tokens that the token could see, itself included

    In DeepSeek-V4 keys are the tokens of a window and compressed entries, in other models tokens.
    """

    read: float
    dense: float
    context: float
    most_read: int
    most_dense: int
    longest_context: int

    @property
    def share(self) -> float:
        """The share of the keys of dense attention that was read."""
        return self.read / self.dense


class KeysRead:
    """A context that counts the keys which every pass of the model reads.

        with KeysRead(model) as keys:
            model(tokens, batch)
        keys.counts().share  # of the keys that dense attention reads

    Layers that are a `SelectingAttention` report what they read. Passes run as Python: the replay of a CUDA graph is
    not counted, so a Generator needs cuda_graphs=False. Passes that train indexers are not counted either. Of two
    nested contexts the inner one counts.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers: list[SelectingAttention] = [m for m in model.modules() if hasattr(m, "key_counter")]
        if not self._layers:
            raise ValueError(
                "model: must have attention layers that tell how many keys they read, by the attribute `key_counter` "
                f"of dsa_layers.evaluation.SelectingAttention, got {type(model).__name__} without such a layer"
            )
        # On several ranks the part of a layer, which is no submodule, computes some passes.
        parts = [getattr(layer, "part", None) for layer in self._layers]
        self._layers += [part for part in parts if part is not None]
        self._tokens = 0
        self._sums = self._most = torch.zeros(3, dtype=torch.int64)

    def __enter__(self) -> Self:
        self._outer = [layer.key_counter for layer in self._layers]
        for layer in self._layers:
            layer.key_counter = self
        return self

    def __exit__(self, *_: object) -> None:
        for layer, outer in zip(self._layers, self._outer):
            layer.key_counter = outer

    def counts(self) -> KeyCounts:
        """Return the counts of all passes so far. Raise RuntimeError if there was none."""
        if not self._tokens:
            raise RuntimeError("counts: no pass was counted")
        return KeyCounts(*(self._sums.double() / self._tokens).tolist(), *self._most.tolist())

    def add(self, read: torch.Tensor, dense: torch.Tensor, context: torch.Tensor) -> None:
        """Add what a layer reports of a pass (`KeyCounter`). The sums stay on the device, so that counting does not
        wait for it."""
        counts = torch.stack((read.long(), dense.long(), context.long()))
        self._tokens += len(context)
        self._sums = self._sums.to(counts.device) + counts.sum(-1)
        self._most = torch.maximum(self._most.to(counts.device), counts.amax(-1))


def all_keys(model: nn.Module, longest: int) -> AbstractContextManager[None]:
    """Return a context of dense attention: every token reads all keys of its sequence, which has at most `longest`
    tokens; in DeepSeek-V4 all compressed entries and its window. For passes over several tokens of a sequence.

    Raises ValueError for a model without indexers.
    """
    return _changed_indexers(model, lambda layer: ("top_k", max(longest, layer.indexer.top_k)))


def latest_keys(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context of attention to a window: every token reads the latest keys, as many as its indexer would
    select. In DeepSeek-V4 these are the latest compressed entries.

    Raises ValueError for a model without indexers.
    """
    return _changed_indexers(model, _latest)


@contextlib.contextmanager
def _changed_indexers(model: nn.Module, change: Callable[[SelectingAttention], tuple[str, Any]]) -> Iterator[None]:
    """A context in which an attribute of each layer's indexer has another value. change: returns both for a layer."""
    # One layer per indexer: a wrapper, as of activation checkpointing or torch.compile, has the indexer of its layer.
    layers = {id(m.indexer): m for m in model.modules() if getattr(m, "indexer", None) is not None}.values()
    if not layers:
        raise ValueError(
            f"model: must have attention layers with an `indexer`, got {type(model).__name__} without such a layer"
        )
    with contextlib.ExitStack() as restored:
        for layer in layers:
            name, value = change(layer)
            before = {name: vars(layer.indexer)[name]} if name in vars(layer.indexer) else {}
            restored.callback(vars(layer.indexer).update, before)
            restored.callback(delattr, layer.indexer, name)  # the class's method is there again
            setattr(layer.indexer, name, value)
        yield


def _latest(layer: SelectingAttention) -> tuple[str, Callable[..., torch.Tensor]]:
    """Return the method by which the layer's indexer selects, and a function in its place that selects the latest
    keys. The method is `pick` in fused attention, else `select`."""
    top_k, selectable = layer.indexer.top_k, layer.selectable

    def latest(batch: TokenBatch, in_slots: bool) -> torch.Tensor:
        """Return the last top_k visible keys, ascending, then -1."""
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

    return ("pick", pick) if hasattr(layer.indexer, "pick") else ("select", select)
