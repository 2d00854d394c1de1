"""Dense, warm-up, sparse: what is trained when, by what."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.families.deepseek_v32.model import DeepseekV32ForCausalLM
from dsa_layers.layers.attention import DSAAttention
from dsa_layers.layers.moe import GroupedSigmoidRouter
from dsa_layers.parallel.ranks import Ranks
from dsa_layers.training.indexer_stage import IndexerStage

from .corpus import draw

STAGES = ("dense", "warmup", "sparse")
ALONE = Ranks(0, 1)
_BALANCE_RATE = 1e-3


@dataclass
class Plan:
    """Of each stage: steps, the highest learning rate, sequences a step; the bytes of a sequence; fields of the model's
    configuration that differ from small_model.FIELDS."""

    steps: tuple[int, int, int] = (5000, 1000, 1150)
    rates: tuple[float, float, float] = (2e-3, 1e-3, 2e-4)
    batch: tuple[int, int, int] = (32, 8, 8)
    length: int = 2048
    fields: dict[str, object] = field(default_factory=dict)


@dataclass
class Row:
    """The losses of a step, in nats: the language model's a byte, the indexers' a token, summed over layers."""

    stage: str
    step: int
    language: float
    indexer: float


@contextlib.contextmanager
def selecting(model: nn.Module, top_k: int) -> Iterator[None]:
    """Every layer selects so many keys; as many as a sequence has make it dense."""
    indexers = [module.indexer for module in model.modules() if isinstance(module, DSAAttention)]
    before = [indexer.top_k for indexer in indexers]
    for indexer in indexers:
        indexer.top_k = top_k
    try:
        yield
    finally:
        for indexer, own in zip(indexers, before):
            indexer.top_k = own


def language_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats a byte of tokens [B, 1 + L], each sequence by itself."""
    batch = SequenceBatch.without_cache([tokens.shape[1] - 1] * len(tokens), tokens.device)
    logits = model(tokens[:, :-1].flatten(), batch, all_tokens=True)
    return nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())


class _Losses(nn.Module):
    """tokens [B, 1 + L] -> this rank's losses, the language model's and the indexers', whose means over the ranks are
    those of one rank. DDP asks for a module whose outputs they are."""

    def __init__(self, model: nn.Module, stage: IndexerStage | None, ranks: Ranks) -> None:
        super().__init__()
        self.model, self._stage, self._ranks = model, stage, ranks

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self._stage is None:  # sequences need nothing of one another
            own = tokens[self._ranks.rank :: self._ranks.size]
            language = language_loss(self.model, own) * (len(own) * self._ranks.size / len(tokens))
            return language, torch.zeros_like(language)
        share = self._stage.share([tokens.shape[1] - 1] * len(tokens), self._ranks, tokens.device)
        logits = self.model(share.own(tokens[:, :-1].flatten()), share, all_tokens=True)
        losses = nn.functional.cross_entropy(logits, share.own(tokens[:, 1:].flatten()), reduction="none")
        return share.mean(losses), self._stage.loss()


def train_stage(
    model: DeepseekV32ForCausalLM,
    name: str,
    plan: Plan,
    text: torch.Tensor,
    watch: Callable[[int], None] = lambda step: None,
    ranks: Ranks = ALONE,
) -> tuple[list[Row], dict[str, float]]:
    """One of STAGES. Returns its losses, and how long it took. watch: called with the number of each dense step.

    Ranks share the sequences of a step in the dense stage, and every sequence's tokens in the others. ValueError if the
    former has fewer sequences than there are ranks."""
    i = STAGES.index(name)
    steps, count = plan.steps[i], plan.batch[i]
    if name == "dense" and count < ranks.size:
        raise ValueError(f"batch: the dense stage needs a sequence for each of {ranks.size} ranks, got {count}")
    stage = None if name == "dense" else IndexerStage(model, name)
    of_indexers = {id(p) for p in IndexerStage(model, "warmup").parameters()}
    # The paper's: nothing but the indexers learns in the warm-up, and they do not before.
    trained = {"dense": lambda p: id(p) not in of_indexers, "warmup": lambda p: id(p) in of_indexers}
    learnable = [p for n, p in model.named_parameters() if not n.endswith("e_score_correction_bias")]
    parameters = list(filter(trained.get(name), learnable)) if name in trained else learnable
    chosen = {id(p) for p in parameters}
    for p in learnable:
        p.requires_grad_(id(p) in chosen)
    optimizer = _Optimizer(parameters, plan.rates[i], steps)
    generator = torch.Generator(text.device).manual_seed(i)
    rows, began = [], time.perf_counter()
    losses_of = _Losses(model, stage, ranks)
    if ranks.size > 1 and steps:
        losses_of = DistributedDataParallel(losses_of, process_group=ranks.group, broadcast_buffers=False)
    with (
        selecting(model, plan.length) if stage is None else stage,
        _balanced(model, name != "warmup", ranks) as balance,
    ):
        for step in range(steps):
            tokens = draw(text, count, plan.length, generator)
            language, indexer = losses_of(tokens)
            (indexer if name == "warmup" else language + indexer).backward()
            optimizer.step()
            balance()
            # Left on the device: a step does not wait for its losses.
            rows.append((step, torch.stack((language.detach(), indexer.detach()))))
            if stage is None:
                watch(step)
    means = ranks.sum(torch.stack([pair for _, pair in rows])) / ranks.size if rows else torch.empty(0, 2)
    losses = [Row(name, step, *pair) for (step, _), pair in zip(rows, means.tolist())]
    seconds = time.perf_counter() - began
    for p in learnable:
        p.requires_grad_(True)
    return losses, {"steps": steps, "seconds": seconds, "tokens": steps * count * plan.length}


class _Optimizer:
    """AdamW with a cosine schedule on fp32 copies of the parameters, which may have fewer bits."""

    def __init__(self, parameters: list[nn.Parameter], rate: float, steps: int) -> None:
        self._parameters = parameters
        self._copies = [p.detach().float().clone() for p in parameters]
        groups = [
            {"params": [c for c in self._copies if c.dim() > 1], "weight_decay": 0.1},
            {"params": [c for c in self._copies if c.dim() == 1], "weight_decay": 0.0},
        ]
        self._adam = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=self._copies[0].is_cuda)
        rise = max(1, min(200, steps // 10))

        def share(step: int) -> float:
            return min((step + 1) / rise, 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))

        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._adam, share)

    @torch.no_grad()
    def step(self) -> None:
        for copy, parameter in zip(self._copies, self._parameters):
            copy.grad, parameter.grad = parameter.grad.float(), None
        nn.utils.clip_grad_norm_(self._copies, 1.0)
        self._adam.step()
        self._schedule.step()
        torch._foreach_copy_(self._parameters, self._copies)


@contextlib.contextmanager
def _balanced(model: nn.Module, learns: bool, ranks: Ranks) -> Iterator:
    """A function to call after each step: experts with more than their share of tokens lose in the gate's bias, others
    gain, as DeepSeek-V3 balances without a loss."""
    gates = [module for module in model.modules() if isinstance(module, GroupedSigmoidRouter)] if learns else []
    chosen: dict[nn.Module, torch.Tensor] = {}
    hooks = [gate.register_forward_hook(lambda gate, _, out: chosen.update({gate: out[0]})) for gate in gates]

    @torch.no_grad()
    def balance() -> None:
        for gate, experts in chosen.items():
            bias = gate.e_score_correction_bias
            load = torch.zeros_like(bias).index_add_(0, experts.flatten(), bias.new_ones(experts.numel()))
            load = ranks.sum(load)
            bias += _BALANCE_RATE * torch.sign(load.mean() - load)

    try:
        yield balance
    finally:
        for hook in hooks:
            hook.remove()
