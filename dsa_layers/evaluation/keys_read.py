"""How many keys attention reads, as each layer of a model reports it while it runs."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import nn

from dsa_layers.layers.selecting_attention import SelectingAttention


@dataclass(frozen=True)
class KeyCounts:
    """Averages over all tokens of all passes and over layers: the keys that a token's attention read, those that dense
    attention over the same cache would have read, and the tokens that it could see, itself included; and the most of
    each. In DeepSeek-V4 keys are the tokens of a window and compressed entries, elsewhere tokens."""

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
                f"of dsa_layers.layers.selecting_attention, got {type(model).__name__} without such a layer"
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
