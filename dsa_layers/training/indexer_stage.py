"""The two stages in which a model's indexers are trained, and their loss."""

from types import TracebackType
from typing import Literal, Self

import torch
from torch import nn

from dsa_layers.layers.attention import DSAAttention

STAGES = ("warmup", "sparse")


class IndexerStage:
    """While it lasts, passes of a model without a cache train its indexers, and their losses come together here.

        import torch
        from dsa_layers import SHIPPED_MODEL, SequenceBatch, load_model
        from dsa_layers.training.indexer_stage import IndexerStage

        model = load_model(SHIPPED_MODEL, dequantize=True, trainable=True)
        tokens = torch.randint(model.config.vocab_size, (201,))
        batch = SequenceBatch.without_cache([120, 80])
        with IndexerStage(model, "sparse") as stage:
            logits = model(tokens[:-1], batch, all_tokens=True)
            loss = torch.nn.functional.cross_entropy(logits, tokens[1:]) + stage.loss()
        loss.backward()

    "warmup"  every token attends to all keys, and the indexer's scores over them follow the sum of the heads'
              attention. The paper trains nothing but the indexers then: `parameters` gives them
    "sparse"  every token attends to the keys that its indexer selects, and the scores over these follow it

    Any indexer is trained that has the `loss` of `dsa_layers.layers.indexer.Indexer`.

    The inputs of an indexer are constants, and so is what it follows: the loss reaches the indexers' parameters and no
    others, and the language model's loss reaches all others. Scores are not quantised. Layers that share an indexer
    (IndexShare) cannot be trained so. Activations may be checkpointed (torch.utils.checkpoint, use_reentrant=False), if
    the backward pass is inside of the `with`.
    Source: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1.1.
    """

    def __init__(self, model: nn.Module, name: Literal["warmup", "sparse"]) -> None:
        if name not in STAGES:
            raise ValueError(f"name: must be one of {', '.join(STAGES)}, got {name!r}")
        self.name = name
        self._layers = [module for module in model.modules() if isinstance(module, DSAAttention)]
        if not self._layers:
            raise ValueError("model: has no DSAAttention, whose indexers are trained here")
        if any(layer.indexer is None for layer in self._layers):
            raise ValueError("model: has layers that share an indexer, which have none to train")
        self._kls: list[torch.Tensor] = []

    def __enter__(self) -> Self:
        for layer in self._layers:
            layer.indexer_stage = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for layer in self._layers:
            layer.indexer_stage = None
        if error is not None:
            self._kls.clear()

    def parameters(self) -> list[nn.Parameter]:
        """Those of the indexers."""
        return [parameter for layer in self._layers for parameter in layer.indexer.parameters()]

    def add(self, kl: torch.Tensor) -> None:
        """A layer's loss of every token. Not what a backward pass computes again for checkpointed activations."""
        if torch._C._current_graph_task_id() == -1:
            self._kls.append(kl)

    def loss(self) -> torch.Tensor:
        """The layers' losses since it was last asked for, summed, and averaged over tokens."""
        if not self._kls:
            raise RuntimeError("loss: no pass since the last call")
        # A sum gives every token's loss the same upstream gradient. The warm-up's backward pass then scales the
        # gradient that its forward pass has saved, instead of computing it for each token's weight.
        total = torch.stack([kl.sum() / max(kl.numel(), 1) for kl in self._kls]).sum()
        self._kls.clear()
        return total
