"""Training of a model's indexers: the two stages and their loss, and the language model's targets."""

import inspect
from collections.abc import Sequence
from types import TracebackType
from typing import Literal, Self

import torch
from torch import nn

from dsa.reference.training.packed_sequences import boundaries
from dsa.runtime.checks import INT32, check_tensor
from dsa_layers.arguments import flag, instance
from dsa_layers.batch import packing
from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.batch.token_batch import TokenBatch
from dsa_layers.engine.paged_attention import PagedAttention
from dsa_layers.parallel.context import ContextBatch
from dsa_layers.parallel.ranks import ALONE, Ranks

STAGES = ("warmup", "sparse")
IGNORED = -100  # the target that torch.nn.functional.cross_entropy leaves out


class IndexerStage:
    """A context in which passes of a model train its indexers; it collects the indexers' losses. Passes take no cache.

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

    "warmup"  every token attends to all keys, and the indexer's scores of them learn to follow the sum of the heads'
              attention. The paper trains the indexers alone in this stage: `parameters` gives their parameters
    "sparse"  every token attends to the keys that its indexer selects, and the scores of these keys learn to follow
              the attention to them

    Every indexer that has the method `loss` of `dsa_layers.layers.indexer.Indexer` can be trained, in attention layers
    that report to a stage, for which they have the attribute `indexer_stage`: `DSAAttention` does. DeepSeek-V4's
    attention and indexer have neither, and ValueError says so.

    drafter: whether the indexer of the model's `drafter` is trained, too: passes must then be followed by passes of the
    drafter, in which it learns. Otherwise it is left as it is.

    An indexer's inputs and its target are detached: the loss has gradients for the indexers' parameters alone, and the
    language model's loss has gradients for all other parameters. Scores are not quantised. Models in which layers share
    an indexer (IndexShare) are refused. A part of a model (`load_model(..., mesh=)`), which has not all heads, is
    refused. Activations may be checkpointed (torch.utils.checkpoint, use_reentrant=False), if the
    backward pass runs inside of the `with`.
    Source: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1.1.
    """

    def __init__(self, model: nn.Module, name: Literal["warmup", "sparse"], *, drafter: bool = False) -> None:
        if name not in STAGES:
            raise ValueError(f"name: must be one of {', '.join(STAGES)}, got {name!r}")
        instance("model", model, nn.Module, "a torch.nn.Module")
        flag("drafter", drafter)
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
        self._without_gradients = False  # whether a pass whose losses are in _kls ran without gradients
        self._before: list[list] = []  # for each open `with`, the previous indexer_stage of every layer

    def __enter__(self) -> Self:
        if not self._before:  # drops the losses of validation passes that nobody read
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
        """The indexers' parameters, each once."""
        return list(dict.fromkeys(p for layer in self._layers for p in layer.indexer.parameters()))

    def share(self, lens: Sequence[int], ranks: Ranks, device: torch.device | str = "cpu") -> ContextBatch:
        """Return this rank's share of packed sequences of these lengths, T tokens in total, as a batch for passes
        within this stage:

            share = stage.share([120, 80], Ranks.of())
            logits = model(share.own(tokens), share, all_tokens=True)
            targets = share.own(next_tokens(tokens, share))
            of_tokens = cross_entropy(logits, targets, reduction="none")
            loss = share.mean(of_tokens, count=200 - 2) + stage.loss()  # two tokens have no target

        The mean of `loss` over the ranks equals the loss of one rank with all tokens, and so do the gradients. DDP and
        FSDP2 take this mean. All ranks must call this together; they exchange `lens`, and the host waits for that.
        Raises ValueError or TypeError on all ranks if `lens` differs between ranks, is not a list of lengths, or has
        fewer tokens than there are ranks. Raises RuntimeError on ranks on which torch.distributed is not initialised.
        """
        instance("ranks", ranks, Ranks, "Ranks")
        return ContextBatch.of(lens, ranks, device)

    def add(self, kl: torch.Tensor, batch: TokenBatch) -> None:
        """kl fp32 [T]: a layer's loss of every token of the batch. It is ignored where a backward pass computes
        checkpointed activations again."""
        if isinstance(batch, ContextBatch) and batch.weight != 1:
            kl = kl * batch.weight
        if torch._C._current_graph_task_id() == -1:
            self._kls.append(kl)
            self._without_gradients |= not torch.is_grad_enabled()

    def loss(self) -> torch.Tensor:
        """The sum over layers of their losses since the last call, each averaged over tokens. Of a rank's share, that
        whose mean over the ranks is the average over all tokens. What passes without gradients gave is forgotten when
        the next `with` begins.

        Raises RuntimeError if there was no pass. Inside the `with` and with gradients enabled, also if a pass ran
        without gradients, as passes under torch.no_grad() and of activations checkpointed with use_reentrant=True do;
        the losses of these passes are dropped then.
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
        # A sum gives every token's loss the same upstream gradient. The warm-up's backward pass then scales the
        # gradient that its forward pass has saved, instead of computing it for each token's weight.
        total = torch.stack([kl.sum() / max(kl.numel(), 1) for kl in self._kls]).sum()
        self._forget()
        return total

    def _forget(self) -> None:
        self._kls.clear()
        self._without_gradients = False


def _trained_layers(model: nn.Module, drafter: bool) -> list[nn.Module]:
    """Return the layers whose indexers are trained, found by their attributes. ValueError says what a model lacks."""
    drafters = [getattr(module, "drafter", None) for module in model.modules() if not drafter]
    left_out = {module for one in drafters if isinstance(one, nn.Module) for module in one.modules()}
    # A wrapper, as of activation checkpointing or torch.compile, hands out the attributes of the layer inside of it.
    layers = [
        module
        for module in model.modules()
        if module not in left_out and inspect.getattr_static(module, "indexer_stage", module) is not module
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
    return layers


def next_tokens(tokens: torch.Tensor, sequences: SequenceBatch | torch.Tensor) -> torch.Tensor:
    """Return int64 [T]: the token that follows each token in its sequence, and -100 for a sequence's last token.

        targets = next_tokens(tokens, batch)
        loss = torch.nn.functional.cross_entropy(model(tokens, batch, all_tokens=True), targets)

    -100 is the default `ignore_index` of cross_entropy, whose mean is over the other targets.

    tokens     int64 [T]: packed sequences, one after the other
    sequences  the SequenceBatch of these tokens, or int32 [B + 1], cu_seqlens: where sequences begin, from 0 to T. For
               a rank's share of the tokens (`IndexerStage.share`) `tokens` are all ranks', as `share.own` takes them

    Raises TypeError or ValueError that names the argument; cu_seqlens on a GPU are not looked at.
    """
    check_tensor("tokens", tokens, (torch.int64,), ("T",))
    if not isinstance(sequences, SequenceBatch | torch.Tensor):
        accepted = "a SequenceBatch or int32 [B + 1], where sequences begin"
        raise TypeError(f"sequences: must be {accepted}, got {type(sequences).__name__}")
    if isinstance(sequences, ContextBatch):
        owners = packing.owners(sequences.lens, sequences.device)
    elif isinstance(sequences, SequenceBatch):
        owners = sequences.sequences
    else:
        check_tensor("sequences", sequences, INT32, ("B+1",))
        if not sequences.is_cuda:
            boundaries("sequences", sequences, ("tokens", tokens))
        rows = torch.arange(len(tokens), dtype=torch.int32, device=tokens.device)
        owners = torch.searchsorted(sequences, rows, right=True)
    check_tensor("tokens", tokens, (torch.int64,), (len(owners),), "sequences")
    targets = torch.full_like(tokens, IGNORED)
    targets[:-1] = torch.where(owners[1:] == owners[:-1], tokens[1:], IGNORED)
    return targets
