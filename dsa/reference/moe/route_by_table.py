"""Router of a mixture of experts that looks up a token's experts in a table by token id, and the sort by expert."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.moe.expert_routing import LEAST_SUM, sort_by_expert


@without_autocast
def route_by_table(
    x: torch.Tensor,
    weight: torch.Tensor,
    table: torch.Tensor,
    tokens: torch.Tensor,
    *,
    scale: float = 1.0,
    first_expert: int = 0,
    count: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The experts that `table` names for `tokens`, their weights, and `sort_by_expert` of these experts.

    The weights are s = sqrt(softplus(x weight^T)) of these experts, with sums in fp32, divided by (the sum of the
    token's s + 1e-20) and multiplied by `scale`. The sort covers `count` experts from `first_expert` on; None: all
    experts from `first_expert` on. A number in the table that is not an expert becomes -1, with s and weight 0, and so
    do all experts of a token id that has no row in the table.

    Returns (experts, weights, order, rows, ends). Differentiable in x and weight, through the weights. Arguments as in
    `dsa.route_by_table`.
    """
    count = len(weight) - first_expert if count is None else count
    # Contiguous operands, because on a CPU the last bit of a product depends on strides.
    logits = torch.nn.functional.linear(x.float().contiguous(), weight.float().contiguous())
    experts = _named(table, tokens, weight.shape[0])
    scores = torch.nn.functional.softplus(logits.gather(-1, experts.clamp(min=0))).sqrt()
    scores = scores.masked_fill(experts < 0, 0)
    weights = scores / (scores.sum(-1, keepdim=True) + LEAST_SUM) * scale
    own = (experts - first_expert).masked_fill(experts < 0, -1)
    return experts, weights, *sort_by_expert(own, count)


def _named(table: torch.Tensor, tokens: torch.Tensor, experts: int) -> torch.Tensor:
    found = table.new_full((len(tokens), table.shape[1]), -1)
    if len(table):
        there = (tokens >= 0) & (tokens < len(table))
        found = torch.where(there[:, None], table[tokens.clamp(0, len(table) - 1)], found)
    return torch.where((found >= 0) & (found < experts), found, -1)
