"""Dense, warm-up, sparse: what is trained when, by what."""

import contextlib
import copy
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dsa_layers import ContextBatch, DSAAttention, IndexerStage, Ranks, SequenceBatch, next_tokens
from dsa_layers.layers.moe import GroupedSigmoidRouter
from dsa_layers.models.deepseek_v32 import DeepseekV32ForCausalLM

from .corpus import draw
from .optimizer import Optimizer
from .passes import Passes

STAGES = ("dense", "warmup", "sparse")
ALONE = Ranks(0, 1)
_BALANCE_RATE = 1e-3

# The drafter's loss counts for less at a stage's end, as DeepSeek-V3's does behind 10 of 14.8T tokens (arXiv
# 2412.19437, section 4.2); the sparse stage is such an end.
_DRAFT_WEIGHTS, _DRAFT_SWITCH = (0.3, 0.1), 2 / 3
# Of the language model's, the drafter's and the indexers' loss at each stage's end.
_WEIGHTS = {"dense": (1.0, _DRAFT_WEIGHTS[1], 0.0), "warmup": (0.0, 0.0, 1.0), "sparse": (1.0, _DRAFT_WEIGHTS[1], 1.0)}


@dataclass
class Plan:
    """Of each stage: the most steps and seconds, the highest learning rate, sequences a step, and the steps from one
    look at the held-out text to the next; the tokens of a sequence and of the vocabulary; the bytes of each held-out
    text that losses are measured on at a stage's end; fields of the model's configuration that differ from
    small_model.FIELDS.

    The defaults are for one H200: seconds end every stage."""

    steps: tuple[int, int, int] = (40000, 1000, 1500)
    seconds: tuple[float, float, float] = (450, 40, 25)
    rates: tuple[float, float, float] = (5e-3, 3e-3, 5e-5)
    batch: tuple[int, int, int] = (32, 8, 8)
    every: tuple[int, int, int] = (250, 250, 50)
    length: int = 2048
    vocab: int = 512
    held_out: int = 2**18
    fields: dict[str, object] = field(default_factory=dict)


@dataclass
class Row:
    """The losses of a step, in nats a token: the language model's, the drafter's of the token after the next one, and
    the indexers', summed over layers."""

    stage: str
    step: int
    language: float
    drafted: float
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


def language_loss(model: DeepseekV32ForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats a token of tokens [B, 1 + L], each sequence by itself."""
    batch = SequenceBatch.without_cache([tokens.shape[1] - 1] * len(tokens), tokens.device)
    logits = model(tokens[:, :-1].flatten(), batch, all_tokens=True)
    return nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())


class _Losses(nn.Module):
    """tokens [B, 1 + L] -> this rank's losses: the language model's, the drafter's and the indexers', whose means over
    the ranks are those of one rank. DDP asks for a module whose outputs they are."""

    def __init__(self, model: DeepseekV32ForCausalLM, stage: IndexerStage | None, ranks: Ranks) -> None:
        super().__init__()
        self.model, self._stage, self._ranks = model, stage, ranks
        self._batch: SequenceBatch | None = None  # of the dense stage, whose steps have one shape

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if self._stage is None:  # sequences are independent, so each rank computes some of them
            own = tokens[self._ranks.rank :: self._ranks.size]
            if self._batch is None:
                self._batch = SequenceBatch.without_cache([own.shape[1] - 1] * len(own), own.device)
            losses = self._of_tokens(own, self._batch)
            share = self._ranks.size / (len(tokens) * (tokens.shape[1] - 1))
            language, drafted = (x.sum() * share for x in losses)
            # The last token of a sequence has no second next token.
            drafted = drafted * ((tokens.shape[1] - 1) / (tokens.shape[1] - 2))
        else:
            batch = self._stage.share([tokens.shape[1] - 1] * len(tokens), self._ranks, tokens.device)
            language, drafted = self._of_tokens(tokens, batch)
            language, drafted = batch.mean(language), batch.mean(drafted, len(tokens) * (tokens.shape[1] - 2))
        return language, drafted, torch.zeros_like(language) if self._stage is None else self._stage.loss()

    def _of_tokens(
        self, tokens: torch.Tensor, batch: SequenceBatch | ContextBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """fp32 [T] each: of this rank's tokens the model's loss, and the drafter's, 0 at a sequence's last token."""
        before, behind = tokens[:, :-1].flatten(), tokens[:, 1:].flatten()
        parts = before, behind, next_tokens(behind, batch)
        before, behind, second = map(batch.own, parts) if isinstance(batch, ContextBatch) else parts
        states = self.model.states(before, batch)
        drafter = self.model.drafter
        guesses = drafter.logits(drafter(behind, states, batch))
        pairs = (self.model.logits(states), behind), (guesses, second)
        return tuple(nn.functional.cross_entropy(*pair, reduction="none") for pair in pairs)


def train_stage(
    model: DeepseekV32ForCausalLM,
    name: str,
    plan: Plan,
    text: torch.Tensor,
    watch: Callable[[int], float] | None = None,
    ranks: Ranks = ALONE,
) -> tuple[list[Row], dict[str, float]]:
    """One of STAGES. Returns its losses, and how long it took. watch: called with the number of a step, every so often
    and after the last one, outside of the stage; of the losses that it returns, which ranks average, the lowest says
    whose weights the model gets in the end.

    Ranks share the sequences of a step in the dense stage, and every sequence's tokens in the others. ValueError if the
    former has fewer sequences than there are ranks."""
    i = STAGES.index(name)
    count = plan.batch[i]
    if name == "dense" and count < ranks.size:
        raise ValueError(f"batch: the dense stage needs a sequence for each of {ranks.size} ranks, got {count}")
    stage = None if name == "dense" else IndexerStage(model, name, drafter=True)
    of_indexers = {id(p) for p in IndexerStage(model, "warmup", drafter=True).parameters()}
    # The paper's: nothing but the indexers learns in the warm-up, and they do not before.
    trained = {"dense": lambda p: id(p) not in of_indexers, "warmup": lambda p: id(p) in of_indexers}
    named = {n: p for n, p in model.named_parameters() if not n.endswith("e_score_correction_bias")}
    chosen = {n: p for n, p in named.items() if name not in trained or trained[name](p)}
    for n, p in named.items():
        p.requires_grad_(n in chosen)
    optimizer = Optimizer(chosen, plan.rates[i])
    generator = torch.Generator(text.device).manual_seed(i)
    rows, began = [], time.perf_counter()
    agree = partial(_mean_over_ranks, ranks=ranks, device=text.device)
    pace, best = _Pace(plan.steps[i], plan.seconds[i], agree), _Best(model, watch, agree)
    losses_of = _Losses(model, stage, ranks)
    if ranks.size > 1 and pace.steps:
        losses_of = DistributedDataParallel(losses_of, process_group=ranks.group, broadcast_buffers=False)
    late = torch.tensor(_WEIGHTS[name], device=text.device)
    early = late.clone()
    if name == "dense":
        early[1] = _DRAFT_WEIGHTS[0]
    # What the ranks' shares of tokens are is agreed on by the host in every step.
    passes = Passes(losses_of, chosen.values(), captured=text.is_cuda and stage is None and ranks.size == 1)
    step = 0
    with _balanced(model, name != "warmup", ranks) as balance:
        while step < pace.steps:
            tokens = draw(text, count, plan.length, generator)
            with selecting(model, plan.length) if stage is None else stage:
                losses = passes(tokens, early if step < _DRAFT_SWITCH * pace.steps else late)
            optimizer.step(step, pace.steps)
            balance()
            rows.append((step, losses))  # left on the device: a step does not wait for its losses
            step += 1
            pace.measure(step)
            if step % plan.every[i] == 0 or step == pace.steps:
                best.look(step)
    best.restore()
    means = ranks.sum(torch.stack([losses for _, losses in rows])) / ranks.size if rows else torch.empty(0, 3)
    losses = [Row(name, step, *of_step) for (step, _), of_step in zip(rows, means.tolist())]
    facts = {"steps": step, "seconds": time.perf_counter() - began, "tokens": step * count * plan.length}
    if best.step is not None:
        facts["best_step"] = best.step
    for p in named.values():
        p.requires_grad_(True)
        p.grad = None
    return losses, facts


def _mean_over_ranks(value: float, ranks: Ranks, device: torch.device) -> float:
    """The same on all ranks."""
    return float(ranks.sum(torch.tensor([value], dtype=torch.float64, device=device))) / ranks.size


class _Pace:
    """How many steps a stage has: `most`, or as many as take `seconds` at the pace so far. Ranks agree on it."""

    _EVERY = 20  # steps; the first ones, which compile kernels, are not typical

    def __init__(self, most: int, seconds: float, agree: Callable[[float], float]) -> None:
        self.steps, self._most, self._seconds, self._agree = most, most, seconds, agree
        self._began = time.perf_counter()
        self._first: float | None = None  # seconds until the first look

    def measure(self, done: int) -> None:
        if done % self._EVERY:
            return
        elapsed = self._agree(time.perf_counter() - self._began)
        if elapsed >= self._seconds:
            self.steps = done
        elif self._first is None:
            self._first = elapsed
        else:
            a_step = (elapsed - self._first) / (done - self._EVERY)
            self.steps = min(self._most, done + max(1, int((self._seconds - elapsed) / a_step)))


class _Best:
    """The weights at which `watch` gave the lowest loss."""

    def __init__(self, model: nn.Module, watch: Callable[[int], float] | None, agree: Callable[[float], float]) -> None:
        self._model, self._watch, self._agree = model, watch, agree
        self._loss = math.inf
        self.step: int | None = None
        self._weights: dict[str, torch.Tensor] = {}

    def look(self, step: int) -> None:
        if self._watch is None:
            return
        loss = self._agree(self._watch(step))
        if loss < self._loss:
            self._loss, self.step = loss, step
            self._weights = copy.deepcopy(self._model.state_dict())

    def restore(self) -> None:
        if self.step is not None:
            self._model.load_state_dict(self._weights)


@contextlib.contextmanager
def _balanced(model: nn.Module, learns: bool, ranks: Ranks) -> Iterator:
    """A function to call after each step: experts with more than their share of tokens lose in the gate's bias, others
    gain, as DeepSeek-V3 balances without a loss."""
    gates = [module for module in model.modules() if isinstance(module, GroupedSigmoidRouter)] if learns else []
    chosen: dict[nn.Module, torch.Tensor] = {}

    def note(gate: nn.Module, _: tuple, out: tuple[torch.Tensor, ...]) -> None:
        if torch.is_grad_enabled():  # held-out text does not count
            chosen[gate] = out[0]

    hooks = [gate.register_forward_hook(note) for gate in gates]

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
