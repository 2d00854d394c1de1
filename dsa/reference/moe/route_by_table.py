"""Router and sort by expert of a mixture of experts whose experts follow from the token."""

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
    """The experts that `table` names for `tokens`, their scores s = sqrt(softplus(x weight^T)), summed in fp32, divided
    by their sum plus 1e-20, times `scale`, and `sort_by_expert` of these experts, numbered from `first_expert` on, of
    which there are `count`: all that there are, if it is None. What is no expert is -1, and its score 0.

    Returns (experts, weights, order, rows, ends). Differentiable in x and weight, through the weights.
    Arguments as of `dsa.route_by_table`.
    """
    count = len(weight) - first_expert if count is None else count
    # A product's last bit on a CPU depends on strides.
    logits = torch.nn.functional.linear(x.float().contiguous(), weight.float().contiguous())
    experts = _named(table, tokens, weight.shape[0])
    scores = torch.nn.functional.softplus(logits.gather(-1, experts.clamp(min=0))).sqrt()
    scores = scores.masked_fill(experts < 0, 0)
    weights = scores / (scores.sum(-1, keepdim=True) + LEAST_SUM) * scale
    own = (experts - first_expert).masked_fill(experts < 0, -1)
    return experts, weights, *sort_by_expert(own, count)


def _named(table: torch.Tensor, tokens: torch.Tensor, experts: int) -> torch.Tensor:
    """int64 [T, K]: the numbers from 0 to experts - 1 in the tokens' rows, -1 for others and where there is no row."""
    found = table.new_full((len(tokens), table.shape[1]), -1)
    if len(table):
        there = (tokens >= 0) & (tokens < len(table))
        found = torch.where(there[:, None], table[tokens.clamp(0, len(table) - 1)], found)
    return torch.where((found >= 0) & (found < experts), found, -1)
