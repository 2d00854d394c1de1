"""The gate of a mixture of experts, and its tokens' rows in the order of their experts."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.checks import (
    check_choice,
    check_flag,
    check_memory,
    check_number,
    check_positive,
    check_same_device,
    check_tensor,
    shape_of,
)

SCORES = ("sigmoid", "sqrtsoftplus")
# Added to the sum that weights are divided by, so that no sum is 0.
LEAST_SUM = 1e-20
_F32, _INTS = (torch.float32,), (torch.int32, torch.int64)


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
    """Which experts a token goes to, and with what weights.

    s = sigmoid(logits), or sqrt(softplus(logits)). Experts are chosen by s + bias: a group of E / n_group experts is
    worth its two best, the best topk_group groups stay, and the top_k best experts in them win, the best first.
    Their weights are s without the bias, divided by their sum plus 1e-20 if `normalise`, times `scale`: a token whose
    scores are all 0 has weights of 0. Of equal ones the lowest number wins.

    logits  fp32 [T, E]; bias fp32 [E]
    Returns experts int64 [T, top_k] and weights fp32 [T, top_k]. A NaN is above all numbers. Differentiable in logits,
    through the weights.
    Raises TypeError or ValueError for other types, dtypes and shapes.
    Source: `Gate` of DeepSeek-V3's inference code ("noaux_tc"), and of DeepSeek-V4's; the 1e-20 is transformers',
    in every family.
    """
    check_gate(logits, bias, top_k, scores, n_group, topk_group, normalise, scale)
    check_memory("logits", logits)
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


def check_gate(
    logits: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    scores: str,
    n_group: int,
    topk_group: int,
    normalise: bool,
    scale: float,
) -> None:
    """The checks of `moe_gate`."""
    check_tensor("logits", logits, _F32, ("T", "E"))
    experts = logits.shape[1]
    check_tensor("bias", bias, _F32, (experts,), "logits")
    check_choice("scores", scores, SCORES)
    check_positive("n_group", n_group)
    check_positive("topk_group", topk_group)
    check_positive("top_k", top_k)
    check_flag("normalise", normalise)
    check_number("scale", scale)
    if experts % n_group:
        raise ValueError(f"n_group: must divide the {experts} experts of logits, got {n_group}")
    if topk_group > n_group:
        raise ValueError(f"topk_group: must be from 1 to n_group={n_group}, got {topk_group}")
    most = topk_group * (experts // n_group)
    if top_k > most:
        raise ValueError(
            f"top_k: must be from 1 to the {most} experts of logits in the topk_group={topk_group} of "
            f"n_group={n_group} groups that stay, got {top_k}"
        )
    check_same_device(("logits", logits), bias=bias)


def sort_by_expert(experts: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The order of entries by expert, entries of the same expert in their own order.

    experts  int32 or int64, any shape of N elements; one below 0 or from `count` on is none, and comes last
    count    E, how many experts there are

    Returns order int32 [N], entry order[r] is in row r; rows int32 in the shape of experts, the row of each entry, -1
    if its expert is none; ends int32 [E], the rows of expert e end before ends[e].
    Raises TypeError or ValueError for other types and dtypes, and counts below 1.
    """
    check_experts(experts, count)
    check_memory("experts", experts)
    flat = experts.flatten()
    flat = torch.where((flat < 0) | (flat >= count), count, flat)
    order = flat.argsort(stable=True)
    rows = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    rows = torch.where(flat == count, -1, rows)
    ends = torch.bincount(flat, minlength=count + 1)[:count].cumsum(0)
    return order.int(), rows.int().view(experts.shape), ends.int()


def check_experts(experts: torch.Tensor, count: int) -> None:
    """The checks of `sort_by_expert`."""
    check_tensor("experts", experts, _INTS, shape_of(experts))
    check_positive("count", count)
