"""How many keys attention reads, counted from what each layer of a model selects while it runs."""

from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from dsa_layers.layers.attention import DSAAttention
from dsa_layers.layers.compressed_attention import CompressedAttention


@dataclass(frozen=True)
class KeyCounts:
    """Over all tokens of all passes, averaged over layers: the keys that a token's attention read, and the tokens that
    it could see, itself included; and the most of each."""

    read: float
    context: float
    most_read: int
    longest_context: int

    @property
    def share(self) -> float:
        return self.read / self.context


class KeysRead:
    """While it lasts, every pass of the model is counted.

        with KeysRead(model) as keys:
            model(tokens, batch)
        keys.counts().share  # of the keys that dense attention reads

    Passes run as Python: the replay of a CUDA graph is not counted, so a Generator needs cuda_graphs=False. The keys of
    DeepSeek-V4 are the tokens of the window and the compressed entries, each of which stands for several tokens.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = [m for m in model.modules() if isinstance(m, DSAAttention | CompressedAttention)]
        if not self._layers:
            raise ValueError("model: must have DSAAttention or CompressedAttention layers, got none")
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._selected: dict[nn.Module, torch.Tensor] = {}
        self._tokens = 0
        self._sums = self._most = torch.zeros(2, dtype=torch.int64)

    def __enter__(self) -> Self:
        for layer in self._layers:
            if isinstance(layer, DSAAttention):
                self._hooks.append(layer.register_forward_hook(self._after_sparse_mla))
                continue
            self._hooks.append(layer.register_forward_hook(self._after_compressed))
            if layer.indexer is not None:
                self._hooks.append(layer.indexer.register_forward_hook(self._after_indexer))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def counts(self) -> KeyCounts:
        """Of the passes so far. Raises RuntimeError if there was none."""
        if not self._tokens:
            raise RuntimeError("counts: no pass was counted")
        read, context = (self._sums.double() / self._tokens).tolist()
        return KeyCounts(read, context, *self._most.tolist())

    def _after_sparse_mla(self, layer: DSAAttention, args: tuple[Any, ...], _: torch.Tensor) -> None:
        batch, selection = args[3], args[5]
        visible, topk_indices = batch.visible_keys, selection.topk_indices
        self._add(visible if topk_indices is None else (topk_indices >= 0).sum(-1), visible)

    def _after_indexer(self, indexer: nn.Module, _: tuple[Any, ...], topk_indices: torch.Tensor) -> None:
        self._selected[indexer] = (topk_indices >= 0).sum(-1)

    def _after_compressed(self, layer: CompressedAttention, args: tuple[Any, ...], _: torch.Tensor) -> None:
        batch = args[3]
        visible = batch.visible_keys
        read = visible.clamp(max=layer.window)
        if layer.indexer is not None:
            read = read + self._selected.pop(layer.indexer)
        elif layer.compressor is not None:
            read = read + batch.entries(layer.compressor.ratio).visible
        self._add(read, visible)

    def _add(self, read: torch.Tensor, visible: torch.Tensor) -> None:
        """Leaves the sums on the device: counting waits for nothing."""
        both = torch.stack((read.long(), visible.long()))
        self._tokens += len(visible)
        self._sums = self._sums.to(both.device) + both.sum(-1)
        self._most = torch.maximum(self._most.to(both.device), both.amax(-1))
