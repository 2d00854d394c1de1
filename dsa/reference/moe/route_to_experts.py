"""Router, gate and sort by expert of a mixture of experts."""

import torch

from dsa.reference.arguments import F32, ROWS, Arguments, Choice, Flag, Int, Number, Tensor
from dsa.reference.autocast import without_autocast
from dsa.reference.checks import check_memory, shape_of
from dsa.reference.moe.expert_routing import SCORES, moe_gate, sort_by_expert

HALVES = (torch.bfloat16, torch.float16)


def _check_numbers(
    weight: torch.Tensor, top_k: int, n_group: int, topk_group: int, first_expert: int, count: int
) -> None:
    experts = weight.shape[0]
    if experts % n_group:
        raise ValueError(f"n_group: must divide the {experts} experts of weight, got {n_group}")
    if topk_group > n_group:
        raise ValueError(f"topk_group: must be from 1 to n_group={n_group}, got {topk_group}")
    most = topk_group * (experts // n_group)
    if top_k > most:
        raise ValueError(
            f"top_k: must be from 1 to the {most} experts of weight in the topk_group={topk_group} of "
            f"n_group={n_group} groups that stay, got {top_k}"
        )
    if first_expert + count > experts:
        raise ValueError(
            f"count: must be at most {experts - first_expert}, the experts of weight from first_expert on, got {count}"
        )


ROUTE_TO_EXPERTS = Arguments(
    rule=_check_numbers,
    x=Tensor("T H", HALVES, layout=ROWS),
    weight=Tensor("E H", HALVES, like="x", layout=ROWS),
    bias=Tensor("E", F32),
    top_k=Int(),
    scores=Choice(SCORES),
    n_group=Int(),
    topk_group=Int(),
    normalise=Flag(),
    scale=Number(),
    first_expert=Int(least=0),
    count=Int(),
)


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
    """`moe_gate` of x weight^T, summed in fp32, and `sort_by_expert` of the experts that it chooses, numbered from
    `first_expert` on, of which there are `count`: all that there are, if it is None.

    Returns (experts, weights, order, rows, ends). Differentiable in x and weight, through the weights.
    Arguments as of `dsa.route_to_experts`.
    """
    count = own_count(weight, first_expert, count)
    ROUTE_TO_EXPERTS.check(
        *(x, weight, bias, top_k, scores, n_group, topk_group, normalise, scale, first_expert, count)
    )
    check_memory("x", x)
    # A product's last bit on a CPU depends on strides.
    logits = torch.nn.functional.linear(x.float().contiguous(), weight.float().contiguous())
    options = {"scores": scores, "n_group": n_group, "topk_group": topk_group, "normalise": normalise, "scale": scale}
    experts, weights = moe_gate(logits, bias, top_k, **options)
    return experts, weights, *sort_by_expert(experts - first_expert, count)


def own_count(weight: object, first_expert: object, count: int | None) -> int | None:
    """All experts from `first_expert` on where count is None; None if one of these is wrong, as its check will say."""
    shape = shape_of(weight)
    if count is None and shape and isinstance(first_expert, (int, torch.SymInt)):
        return shape[0] - first_expert
    return count
