"""The gate of a mixture of experts, and the sort of (token, expert) pairs by expert."""

import torch

from dsa.reference.autocast import without_autocast

# Added to the sum that weights are divided by.
LEAST_SUM = 1e-20


@without_autocast
def moe_gate(
    logits: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    *,
    scores: str = "sigmoid",
    n_group: int = 1,
    topk_group: int = 1,
    normalise: bool = True,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts that each token is sent to, and their weights.

    s = sigmoid(logits), or sqrt(softplus(logits)). The experts form n_group groups of E / n_group. If there are several
    groups, a group's score is the sum of the group's two largest s + bias, and only the topk_group groups with the
    largest scores remain. Of the remaining experts, the top_k with the largest s + bias are chosen, the largest first.
    An expert's weight is its s without the bias, times `scale`; with `normalise`, s is first divided by (the sum of the
    chosen experts' s + 1e-20). Of equal groups or experts the one with the lowest number is chosen.

    NaN counts as larger than all numbers. Differentiable in logits, through the weights. Arguments as in
    `dsa.moe_gate`.
    Source: `Gate` of DeepSeek-V3's inference code ("noaux_tc"), and of DeepSeek-V4's; the 1e-20 is from the
    transformers library, which adds it in all model families.
    """
    logits = logits.contiguous()  # the last bit of a sigmoid on a CPU depends on strides
    s = torch.sigmoid(logits) if scores == "sigmoid" else torch.nn.functional.softplus(logits).sqrt()
    choice = s + bias
    if n_group > 1:
        groups = choice.unflatten(-1, (n_group, -1))
        of_group = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(-1)
        kept = torch.zeros_like(of_group, dtype=torch.bool).scatter_(-1, _best(of_group, topk_group), True)
        choice = groups.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
    experts = _best(choice, top_k)
    weights = s.gather(-1, experts)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + LEAST_SUM)
    return experts, weights * scale


def _best(x: torch.Tensor, count: int) -> torch.Tensor:
    return x.sort(dim=-1, descending=True, stable=True).indices[..., :count].contiguous()


def sort_by_expert(experts: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort entries by expert. Entries of one expert keep their order; entries outside [0, count) have no expert and
    come last.

    Arguments and results (order, rows, ends) as in `dsa.sort_by_expert`.
    """
    flat = experts.flatten()
    flat = torch.where((flat < 0) | (flat >= count), count, flat)
    order = flat.argsort(stable=True)
    rows = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    rows = torch.where(flat == count, -1, rows)
    ends = torch.bincount(flat, minlength=count + 1)[:count].cumsum(0)
    return order.int(), rows.int().view(experts.shape), ends.int()
