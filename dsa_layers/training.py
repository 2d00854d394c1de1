"""Training of indexers: the warm-up and sparse stages, and the targets of the language model's loss."""

import inspect
from collections.abc import Sequence
from types import TracebackType
from typing import Literal, Self

import torch
from torch import nn

from dsa.runtime.checks import check_flag, check_instance, check_tensor
from dsa_layers.batch import packing
from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.batch.token_batch import TokenBatch
from dsa_layers.engine.paged_attention import PagedAttention
from dsa_layers.layers.window_attention import WindowAttention
from dsa_layers.parallel.context import ContextBatch
from dsa_layers.parallel.ranks import ALONE, Ranks

STAGES = ("warmup", "sparse")
IGNORED = -100  # the default `ignore_index` of torch.nn.functional.cross_entropy


class IndexerStage:
    """A context manager inside which passes of a model compute the losses of its indexers. `loss` returns their sum.
    Call the model without a cache.

        import torch
        from dsa_layers import SHIPPED_MODEL, IndexerStage, SequenceBatch, load_model, next_tokens

        model = load_model(SHIPPED_MODEL, dequantize=True, trainable=True)
        device = next(model.parameters()).device
        tokens = torch.randint(model.config.vocab_size, (200,), device=device)
        batch = SequenceBatch.without_cache([120, 80], device)
        with IndexerStage(model, "sparse") as stage:
            logits = model(tokens, batch, all_tokens=True)
            loss = torch.nn.functional.cross_entropy(logits, next_tokens(tokens, batch)) + stage.loss()
        loss.backward()

    model    the model as `load_model(..., trainable=True)` returns it, not prepared for inference by `fuse`
    name     the stage:
             "warmup": every token attends to all keys. The indexer's scores of all keys learn to follow the attention
             weights, summed over heads. DeepSeek-V3.2 trained only the indexers' `parameters` in this stage
             "sparse": every token attends to the keys that its indexer selects. The scores of these keys learn to
             follow the attention to them
    drafter  True: also train the indexer of the model's `drafter`; run the drafter after each pass of the model

    Raises ValueError for a model whose indexers cannot be trained: no layer has the attribute `indexer_stage`, or a
    layer with this attribute has no indexer with the method `loss` (`dsa_layers.layers.indexer.Indexer`). So
    DeepSeek-V4 and models in which layers share an indexer (IndexShare) are refused. Also raises ValueError for models
    with sinks, which the loss would ignore, and for parts of a model (`load_model(..., mesh=)`), which lack some heads.

    The inputs and the target of an indexer are detached. The indexers' loss therefore has gradients only for the
    indexers' parameters, and the language model's loss only for all other parameters. Scores are not quantised.
    Activations may be checkpointed (torch.utils.checkpoint, use_reentrant=False) if the backward pass runs inside the
    `with` block.
    Source: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1.1.
    """

    def __init__(self, model: nn.Module, name: Literal["warmup", "sparse"], *, drafter: bool = False) -> None:
        if name not in STAGES:
            raise ValueError(f"name: must be one of {', '.join(STAGES)}, got {name!r}")
        check_instance("model", model, nn.Module, "a torch.nn.Module")
        check_flag("drafter", drafter)
        if any(getattr(module, "ranks", ALONE).size > 1 for module in model.modules()):
            raise ValueError(
                "mesh: a part of a model trains no indexer, which follows the attention of all heads; accepted: a "
                "model that was loaded without mesh. Ranks share the tokens of a step by IndexerStage.share"
            )
        if any(type(module) is PagedAttention for module in model.modules()):
            raise ValueError(
                "model: was prepared for inference by dsa_layers.fuse; accepted: a model in plain form, as "
                "load_model(..., trainable=True) returns it"
            )
        self.name = name
        self._layers = _trained_layers(model, drafter)
        self._kls: list[torch.Tensor] = []
        self._without_gradients = False  # whether _kls contains losses of a pass that ran without gradients
        self._before: list[list] = []  # per open `with` block: every layer's indexer_stage before the block

    def __enter__(self) -> Self:
        if not self._before:  # drop losses of earlier passes without gradients
            self._kls, self._without_gradients = [kl for kl in self._kls if kl.requires_grad], False
        self._before.append([layer.indexer_stage for layer in self._layers])
        for layer in self._layers:
            layer.indexer_stage = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for layer, stage in zip(self._layers, self._before.pop()):
            layer.indexer_stage = stage
        if error is not None:
            self._forget()

    def parameters(self) -> list[nn.Parameter]:
        """Return the indexers' parameters without duplicates."""
        return list(dict.fromkeys(p for layer in self._layers for p in layer.indexer.parameters()))

    def share(self, lens: Sequence[int], ranks: Ranks, device: torch.device | str = "cpu") -> ContextBatch:
        """Return this rank's share of packed sequences with lengths `lens`, T tokens in total, as a batch for passes
        inside this stage:

            share = stage.share([120, 80], Ranks.of())
            logits = model(share.own(tokens), share, all_tokens=True)
            targets = share.own(next_tokens(tokens, share))
            of_tokens = cross_entropy(logits, targets, reduction="none")
            loss = share.mean(of_tokens, count=200 - 2) + stage.loss()  # the last token of each sequence has no target

        The mean of `loss` over the ranks equals the loss of one rank with all tokens. The same holds for the gradients,
        which DDP and FSDP2 average. All ranks must call this method together, with equal `lens`.
        Raises ValueError on all ranks if one rank's `lens` has fewer tokens than there are ranks, has a length below 1
        or differs from rank 0's. A rank whose `lens` has a wrong type raises TypeError instead.
        """
        check_instance("ranks", ranks, Ranks, "Ranks")
        return ContextBatch.of(lens, ranks, device)

    def add(self, kl: torch.Tensor, batch: TokenBatch) -> None:
        """Add one layer's losses in one pass. kl: fp32 [T], the loss of every token of `batch`. A backward pass that
        recomputes checkpointed activations adds nothing."""
        if isinstance(batch, ContextBatch) and batch.weight != 1:
            kl = kl * batch.weight
        if torch._C._current_graph_task_id() == -1:
            self._kls.append(kl)
            self._without_gradients |= not torch.is_grad_enabled()

    def loss(self) -> torch.Tensor:
        """Return the sum of the losses that the layers have added since the last call, each averaged over the tokens of
        its pass. For a batch from `share` the average is weighted, so that the mean over the ranks is the average over
        all tokens.

        Raises RuntimeError if no losses were added since the last call. Inside the `with` block and with gradients
        enabled, also raises RuntimeError if a pass ran without gradients (under torch.no_grad(), or checkpointed with
        use_reentrant=True) although an indexer's parameter requires them, and drops all collected losses. Losses
        without gradients that this method has not returned are dropped at the start of the next `with` block.
        """
        if not self._kls:
            raise RuntimeError("loss: no pass since the last call")
        learns = any(p.requires_grad for p in self.parameters())
        if self._before and self._without_gradients and learns and torch.is_grad_enabled():
            self._forget()
            raise RuntimeError(
                "loss: a pass since the last call ran without gradients, and no indexer learns from it: checkpoint "
                "activations with use_reentrant=False, and take the loss of a pass under torch.no_grad() there, too, "
                "before the next pass"
            )
        # The gradient of `sum` is one value expanded to all tokens (stride 0). From this, the backward pass of
        # `dsa.indexer_warmup_attention` knows that it only needs to scale the index keys' saved gradient.
        total = torch.stack([kl.sum() / max(kl.numel(), 1) for kl in self._kls]).sum()
        self._forget()
        return total

    def _forget(self) -> None:
        self._kls.clear()
        self._without_gradients = False


def _trained_layers(model: nn.Module, drafter: bool) -> list[nn.Module]:
    """Return the layers with the attribute `indexer_stage`, except `WindowAttention` layers. Include the drafter's
    layers only if `drafter`. Raise ValueError if there is no such layer, or if a layer has sinks or no indexer with
    `loss`."""
    drafters = [getattr(module, "drafter", None) for module in model.modules() if not drafter]
    left_out = {module for one in drafters if isinstance(one, nn.Module) for module in one.modules()}
    # getattr_static ignores wrappers, for example of activation checkpointing, that forward their layer's attributes.
    layers = [
        module
        for module in model.modules()
        if module not in left_out
        and not isinstance(module, WindowAttention)
        and inspect.getattr_static(module, "indexer_stage", module) is not module
    ]
    if not layers:
        raise ValueError(
            "model: must have attention layers with the attribute `indexer_stage`, which train their indexers as "
            f"DSAAttention does, got {type(model).__name__} without such a layer"
        )
    for layer in layers:
        if not hasattr(layer.indexer, "loss"):
            raise ValueError(
                "model: each attention layer must have an indexer of its own, with a method `loss`, got "
                f"{type(layer.indexer).__name__}"
            )
        if getattr(layer, "sinks", None) is not None:
            raise ValueError("model: must have attention layers without sinks, because the loss ignores sinks")
    return layers


def next_tokens(tokens: torch.Tensor, batch: SequenceBatch) -> torch.Tensor:
    """Return int64 [T]: the token that follows each token in its sequence, and -100 for a sequence's last token.

        targets = next_tokens(tokens, batch)
        loss = torch.nn.functional.cross_entropy(model(tokens, batch, all_tokens=True), targets)

    -100 is the default `ignore_index` of cross_entropy, which averages over the other targets.

    tokens  int64 [T]: packed sequences; with a rank's share, the tokens of all ranks
    batch   the SequenceBatch of these tokens, or a rank's share of them (`IndexerStage.share`), whose method `own`
            selects this rank's targets from the result

    Raises TypeError or ValueError, which names the argument, for a wrong argument.
    """
    check_instance("batch", batch, SequenceBatch, "a SequenceBatch")
    lens = batch.lens if isinstance(batch, ContextBatch) else batch.query_lens
    check_tensor("tokens", tokens, (torch.int64,), (sum(lens),), "batch")
    targets = torch.full_like(tokens, IGNORED)
    targets[:-1] = tokens[1:]
    last = packing.offsets(lens, tokens.device)[1:].long() - 1
    return targets.index_fill(0, last, IGNORED)
