"""The gate of a mixture of experts, and the sort of (token, expert) entries by expert."""

import torch

from dsa.kernels.moe.limits import MAX_EXPERTS, MAX_GROUPS, MAX_SORT_ENTRIES, MAX_SORT_EXPERTS, MAX_TOP_K
from dsa.reference.moe import expert_routing as reference
from dsa.runtime.declare import F32, Arguments, Choice, Flag, Int, Number, Tensor, at_most, dtype_name, op

__all__ = ["moe_gate", "sort_by_expert"]

SCORES = ("sigmoid", "sqrtsoftplus")


def check_groups(name: str, experts: int, top_k: int, n_group: int, topk_group: int) -> None:
    """Raise ValueError unless top_k experts can be chosen from topk_group groups. experts: the number in the argument
    `name`"""
    if experts % n_group:
        raise ValueError(f"n_group: must divide the {experts} experts of {name}, got {n_group}")
    if topk_group > n_group:
        raise ValueError(f"topk_group: must be from 1 to n_group={n_group}, got {topk_group}")
    most = topk_group * (experts // n_group)
    if top_k > most:
        raise ValueError(
            f"top_k: must be from 1 to the {most} experts of {name} in the topk_group={topk_group} of "
            f"n_group={n_group} groups that stay, got {top_k}"
        )


def _check_groups(logits: torch.Tensor, top_k: int, n_group: int, topk_group: int) -> None:
    check_groups("logits", logits.shape[1], top_k, n_group, topk_group)


MOE_GATE = Arguments(
    rule=_check_groups,
    logits=Tensor("T E", F32),
    bias=Tensor("E", F32),
    top_k=Int(),
    scores=Choice(SCORES),
    n_group=Int(),
    topk_group=Int(),
    normalise=Flag(),
    scale=Number(),
)
SORT_BY_EXPERT = Arguments(experts=Tensor("...", (torch.int32, torch.int64)), count=Int())


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
    """Choose the experts of each token, and compute their weights.

    s = sigmoid(logits), or sqrt(softplus(logits)). Experts are chosen by s + bias. The score of a group of E / n_group
    consecutive experts is the sum of the two largest s + bias in the group. The topk_group groups with the largest
    scores remain, and of their experts the top_k with the largest s + bias are chosen, the largest first. An expert's
    weight is its s without the bias, times `scale`. With `normalise`, s is first divided by (the sum of the chosen
    experts' s + 1e-20), so a token whose s are all 0 has weights of 0. Ties between groups or experts go to the lowest
    number.

    logits      fp32 [T, E]
    bias        fp32 [E]
    top_k       experts per token
    scores      "sigmoid" or "sqrtsoftplus"
    n_group     number of groups, all of the same size
    topk_group  number of groups that remain
    normalise   whether a token's weights are divided by their sum
    scale       multiplies the weights: a finite number

    Returns experts int64 [T, top_k] and weights fp32 [T, top_k]. A NaN counts as larger than all numbers; experts are
    always from 0 to E - 1. Differentiable in logits, through the weights: if gradients are asked for, the formula runs
    in PyTorch. Raises TypeError or ValueError for other types, dtypes, shapes and devices.
    On Hopper: one kernel, which computes s with a relative error of a few 10^-6; E up to 1024, top_k and n_group up to
    32.
    Deterministic. CUDA-graph safe.
    Source: `Gate` of DeepSeek-V3's inference code ("noaux_tc"), and of DeepSeek-V4's; the 1e-20 is from the
    transformers library, which adds it in all model families.
    """
    return _moe_gate(logits, bias, top_k, scores, n_group, topk_group, normalise, scale)


def sort_by_expert(experts: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort the N entries of `experts`, such as (token, expert) pairs, by expert. Entries of the same expert keep their
    order.

    experts  int32 or int64, any shape of N elements; an entry with a number outside [0, count) has no expert and comes
             last
    count    E, the number of experts

    Returns (order, rows, ends):
      order  int32 [N]: row r of the sorted rows is entry order[r] of the flattened experts
      rows   int32 in the shape of experts: each entry's row in the sorted order, or -1 for an entry without an expert
      ends   int32 [E]: the rows of expert e end before row ends[e], as in `grouped_fp8_gemm_nt`; ends[E - 1] is N minus
             the number of entries without an expert
    In expert parallelism a process numbers its own experts from 0 and gives other experts numbers outside [0, count).
    The rows of these experts then come last, where grouped products compute nothing and `combine_experts` reads
    nothing.
    Raises TypeError or ValueError for other types and dtypes, and counts below 1.
    On Hopper: one kernel, no workspace; N up to 2^31 - 512, E up to 2^31 - 2. Deterministic. CUDA-graph safe.
    """
    return _sort_by_expert(experts, count)


def _gate_results(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = len(logits), top_k
    return logits.new_empty(shape, dtype=torch.int64), logits.new_empty(shape)


@op(
    arguments=MOE_GATE,
    reference=reference.moe_gate,
    results=_gate_results,
    limits={"E": at_most(MAX_EXPERTS), "top_k": at_most(MAX_TOP_K), "n_group": at_most(MAX_GROUPS)},
    differentiable=True,
)
def _moe_gate(
    logits: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    scores: str,
    n_group: int,
    topk_group: int,
    normalise: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    from dsa.kernels.moe.moe_gate_sm90 import compile_moe_gate

    experts, weights = _gate_results(logits, top_k)
    if len(logits):
        launch = compile_moe_gate(logits.shape[1], top_k, scores, n_group, topk_group, normalise)
        rows = logits if logits.stride(-1) == 1 else logits.contiguous()
        launch(rows, bias.contiguous(), experts, weights, float(scale))
    return experts, weights


def _sort_results(experts: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shapes = (experts.numel(),), experts.shape, (count,)
    order, rows, ends = (experts.new_empty(shape, dtype=torch.int32) for shape in shapes)
    return order, rows, ends


@op(
    arguments=SORT_BY_EXPERT,
    reference=reference.sort_by_expert,
    results=_sort_results,
    limits={"rows": at_most(MAX_SORT_ENTRIES), "count": at_most(MAX_SORT_EXPERTS)},
)
def _sort_by_expert(experts: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from dsa.kernels.moe.sort_by_expert_sm90 import compile_sort_by_expert

    order, rows, ends = _sort_results(experts, count)
    if experts.numel() == 0:
        return order, rows, ends.zero_()
    launch = compile_sort_by_expert(dtype_name(experts.dtype))
    launch(experts.contiguous().view(-1), order, rows.view(-1), ends)
    return order, rows, ends
