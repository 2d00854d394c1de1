"""Router, gate and sort by expert of a mixture of experts."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.moe.expert_routing import moe_gate, sort_by_expert


@without_autocast
def route_to_experts(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    *,
    scores: str = "sigmoid",
    n_group: int = 1,
    topk_group: int = 1,
    normalise: bool = True,
    scale: float = 1.0,
    first_expert: int = 0,
    count: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`moe_gate` of x weight^T, summed in fp32, and `sort_by_expert` of the experts that the gate chooses.

    The sort covers `count` experts from `first_expert` on; None: all experts from `first_expert` on.

    Returns (experts, weights, order, rows, ends). Differentiable in x and weight, through the weights. Arguments as in
    `dsa.route_to_experts`.
    """
    count = len(weight) - first_expert if count is None else count
    # Contiguous operands, because on a CPU the last bit of a product depends on strides.
    logits = torch.nn.functional.linear(x.float().contiguous(), weight.float().contiguous())
    options = {"scores": scores, "n_group": n_group, "topk_group": topk_group, "normalise": normalise, "scale": scale}
    experts, weights = moe_gate(logits, bias, top_k, **options)
    return experts, weights, *sort_by_expert(experts - first_expert, count)
