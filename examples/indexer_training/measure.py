"""What was learnt: the loss on held-out text, how much of the attention the selected keys carry, and how often the
drafter guesses what the model chooses."""

from dataclasses import dataclass

import torch
from torch import nn

import dsa
from dsa_layers import DSAAttention, SequenceBatch
from dsa_layers.models.protocols import CheckpointModel

from .stages import language_loss, selecting

_TOKENS = 16384  # a pass


@torch.no_grad()
def held_out_loss(model: nn.Module, tokens: torch.Tensor, top_k: int) -> float:
    """Nats a token of tokens [N, 1 + L], every token attending to `top_k` keys."""
    count = max(1, _TOKENS // tokens.shape[1])
    with selecting(model, top_k):
        losses = [language_loss(model, part) * len(part) for part in tokens.split(count)]
    return float(torch.stack(losses).sum()) / len(tokens)


@dataclass
class Recall:
    """Of each layer, the drafter's last, the share of the attention mass that selected keys carry, on average over the
    tokens that see more than `top_k`: those that the indexer selects, the best ones, random ones."""

    indexer: list[float]
    oracle: list[float]
    random: list[float]

    def means(self) -> dict[str, float]:
        return {name: sum(values) / len(values) for name, values in vars(self).items()}


@torch.no_grad()
def recall(model: CheckpointModel, tokens: torch.Tensor, top_k: int, *, dense: bool) -> Recall:
    """Of tokens [N, 1 + L]. dense: the layers' inputs are those of a pass that attends to all keys."""
    layers = [module for module in model.modules() if isinstance(module, DSAAttention)]
    sums = torch.zeros(3, len(layers), dtype=torch.float64, device=tokens.device)
    inputs: dict[nn.Module, tuple] = {}
    hooks = [layer.register_forward_pre_hook(lambda layer, args: inputs.update({layer: args[:3]})) for layer in layers]
    batch = SequenceBatch.without_cache([tokens.shape[1] - 1], tokens.device)
    try:
        for sequence in tokens:
            with selecting(model, tokens.shape[1] if dense else top_k):
                model.drafter(sequence[1:], model.states(sequence[:-1], batch), batch)
            for i, layer in enumerate(layers):
                sums[:, i] += _shares(layer, *inputs[layer], top_k)
    finally:
        for hook in hooks:
            hook.remove()
    return Recall(*(sums / len(tokens)).tolist())


def _shares(layer: DSAAttention, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, top_k: int) -> torch.Tensor:
    """float64 [3]: the means of Recall, of one sequence."""
    qr = layer.q_a_layernorm(layer.q_a_proj(x))
    mass = attention_mass(layer, x, qr, cos, sin)
    visible = torch.arange(1, len(x) + 1, dtype=torch.int32, device=x.device)
    scores = dsa.mqa_logits(*layer.indexer.project(x, qr, (cos, sin)), torch.zeros_like(visible), visible)
    choosing = visible > top_k
    mass, scores = mass[choosing], scores[choosing]
    picked = mass.gather(1, scores.topk(top_k).indices).sum(1)
    best = mass.topk(top_k).values.sum(1)
    # Of random keys every one is as likely to be among them.
    random = top_k / visible[choosing].double()
    return torch.stack([share.double().mean() for share in (picked, best, random)])


def attention_mass(
    layer: DSAAttention, x: torch.Tensor, qr: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """fp32 [T, T]: how much of the dense attention of each token goes to each key, averaged over heads."""
    q = layer.q_b_proj(qr).unflatten(-1, (layer.n_heads, -1))
    q_nope, q_pe = q.split((layer.nope_dim, layer.rope_dim), -1)
    latent, k_pe = layer.kv_a_proj_with_mqa(x).split((layer.kv_lora_rank, layer.rope_dim), -1)
    expanded = layer.kv_b_proj(layer.kv_a_layernorm(latent)).unflatten(-1, (layer.n_heads, -1))
    q_pe, k_pe = (dsa.apply_rotary(part, cos, sin, interleaved=True) for part in (q_pe, k_pe))
    logits = torch.einsum("thd,shd->hts", q_nope.float(), expanded[..., : layer.nope_dim].float())
    logits = logits + torch.einsum("thd,sd->hts", q_pe.float(), k_pe.float())
    visible = torch.ones(logits.shape[1:], dtype=torch.bool, device=x.device).tril()
    return (layer.softmax_scale * logits).masked_fill(~visible, -torch.inf).softmax(-1).mean(0)


@dataclass
class Acceptance:
    """Of drafts behind `positions` of held-out text, by their number, 1 to K. right: the share that is the model's own
    greedy choice there, where the text has the drafts before it; taken: how many of 1, 2, ... K drafts are right up to
    the first that is not, on average, which a greedy pass over the text would take."""

    positions: int
    right: list[float]
    taken: list[float]


@torch.no_grad()
def acceptance(model: CheckpointModel, tokens: torch.Tensor, drafts: int = 3, *, positions: int) -> Acceptance:
    """Behind so many positions of each of tokens [N, 1 + L], evenly spread. The text is given: the drafter's later
    steps get its tokens, and their own states, as in generation."""
    matches = torch.cat([_matches(model, sequence, drafts, positions) for sequence in tokens]).double()
    right, chains = matches.mean(0), matches.cumprod(1).mean(0)
    return Acceptance(len(matches), right.tolist(), chains.cumsum(0).tolist())


def _matches(model: CheckpointModel, sequence: torch.Tensor, drafts: int, positions: int) -> torch.Tensor:
    """bool [positions, drafts] of one sequence [1 + L]."""
    before, behind = sequence[:-1], sequence[1:]
    batch = SequenceBatch.without_cache([len(before)], sequence.device)
    states = model.states(before, batch)
    choices = model.logits(states).argmax(-1)  # at position t, of the token t + 1
    drafted = model.drafter(behind, states, batch)
    at = torch.linspace(0, len(before) - 1 - drafts, positions, dtype=torch.float64).long().unique().tolist()
    own = {t: [drafted[t]] for t in at}  # the drafter's states of each of its steps behind position t
    for step in range(1, drafts):
        # Each position's prefix as a sequence: up to t with the target's states, behind it with the drafter's.
        lens = [t + 1 + step for t in at]
        parts = [behind[:n] for n in lens], [torch.cat((states[: t + 1], torch.stack(own[t]))) for t in at]
        batch = SequenceBatch.without_cache(lens, sequence.device)
        ends = model.drafter(*map(torch.cat, parts), batch)[torch.tensor(lens).cumsum(0) - 1]
        for t, state in zip(at, ends):
            own[t].append(state)
    guesses = model.drafter.logits(torch.stack([state for t in at for state in own[t]])).argmax(-1)
    starts = torch.tensor(at, device=sequence.device)[:, None]
    expected = choices[starts + 1 + torch.arange(drafts, device=sequence.device)]
    return guesses.view_as(expected) == expected
