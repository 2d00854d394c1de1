"""What was learnt: the loss on held-out text, and how much of the attention the selected keys carry."""

from dataclasses import dataclass

import torch
from torch import nn

import dsa
from dsa_layers.layers.attention import DSAAttention

from .stages import language_loss, selecting

_TOKENS = 16384  # a pass


@torch.no_grad()
def held_out_loss(model: nn.Module, tokens: torch.Tensor, top_k: int) -> float:
    """Nats a byte of tokens [N, 1 + L], every token attending to `top_k` keys."""
    count = max(1, _TOKENS // tokens.shape[1])
    with selecting(model, top_k):
        losses = [language_loss(model, part) * len(part) for part in tokens.split(count)]
    return float(torch.stack(losses).sum()) / len(tokens)


@dataclass
class Recall:
    """Of each layer the share of the attention mass that selected keys carry, on average over the tokens that see more
    than `top_k`: those that the indexer selects, the best ones, random ones."""

    indexer: list[float]
    oracle: list[float]
    random: list[float]

    def means(self) -> dict[str, float]:
        return {name: sum(values) / len(values) for name, values in vars(self).items()}


@torch.no_grad()
def recall(model: nn.Module, tokens: torch.Tensor, top_k: int, *, dense: bool) -> Recall:
    """Of tokens [N, 1 + L]. dense: the layers' inputs are those of a pass that attends to all keys."""
    layers = [module for module in model.modules() if isinstance(module, DSAAttention)]
    sums = torch.zeros(3, len(layers), dtype=torch.float64, device=tokens.device)
    inputs: dict[nn.Module, tuple] = {}
    hooks = [layer.register_forward_pre_hook(lambda layer, args: inputs.update({layer: args[:3]})) for layer in layers]
    try:
        for sequence in tokens:
            with selecting(model, tokens.shape[1] if dense else top_k):
                language_loss(model, sequence[None])
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
    scores = dsa.mqa_logits(*layer.indexer.project(x, qr, cos, sin), torch.zeros_like(visible), visible)
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
