"""Router, gate and sort by expert of a mixture of experts in one op, for few tokens."""

import functools

import torch

from dsa.kernels.moe.limits import MAX_GROUPS, MAX_TOP_K
from dsa.kernels.moe.route_to_experts_limits import (
    CHANNEL_MULTIPLE,
    FEW_TOKENS,
    MAX_EXPERTS,
    MAX_TOKENS,
    TILE_TOKENS,
)
from dsa.ops.moe.expert_routing import SCORES, check_groups
from dsa.reference.moe import route_to_experts as reference
from dsa.runtime.declare import (
    F32,
    ROWS,
    Arguments,
    Choice,
    Flag,
    Int,
    Number,
    Tensor,
    at_most,
    dtype_name,
    multiple_of,
    op,
    rows_at_16_bytes,
    shape_of,
)

__all__ = ["route_to_experts"]

HALVES = (torch.bfloat16, torch.float16)


def _check_numbers(
    weight: torch.Tensor, top_k: int, n_group: int, topk_group: int, first_expert: int, count: int
) -> None:
    experts = weight.shape[0]
    check_groups("weight", experts, top_k, n_group, topk_group)
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

Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


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
) -> Routed:
    """Choose the experts of each token, compute their weights, and sort all (token, expert) entries by expert.

      logits = x W^T, summed in fp32
      experts, weights = moe_gate(logits, bias, top_k, scores, n_group, topk_group, normalise, scale)
      order, rows, ends = sort_by_expert(experts - first_expert, count)

    x             [T, H] bf16 or fp16
    weight        W [E, H] of x's dtype
    bias          fp32 [E]
    top_k         experts per token; for top_k, scores, n_group, topk_group, normalise and scale see `moe_gate`
    first_expert  the lowest number of this process's experts
    count         how many experts this process has, first_expert + count at most E; None: E - first_expert

    Returns (experts, weights, order, rows, ends):
      experts  int64 [T, top_k], always numbers from 0 to E - 1
      weights  fp32 [T, top_k]
      order    int32 [T top_k]: row r has entry order[r]; entry t top_k + j is the j-th expert of token t
      rows     int32 [T, top_k]: the row of each entry, or -1 for an expert of another process
      ends     int32 [count]: the rows of expert first_expert + e end before row ends[e]
    NaN and infinities of a token stay in that token. Differentiable in x and weight, through the weights: if gradients
    are asked for, the formula runs in PyTorch. Raises TypeError or ValueError for other types, dtypes, shapes, strides
    and devices.
    On Hopper: two kernels, where the second is launched while the first runs, and a workspace of 4 E bytes per token; T
    up to 64, E up to 512, H a multiple of 32, top_k and n_group up to 32, rows of x and weight at multiples of 16
    bytes. The tensor cores sum the logits in another order than the reference; the order does not depend on the other
    tokens. From these logits the op computes the same bits as `moe_gate` and `sort_by_expert`. Deterministic.
    CUDA-graph safe.
    Source: see `moe_gate`.
    """
    count = own_count(weight, first_expert, count)
    return _route_to_experts(
        *(x, weight, bias, top_k, scores, n_group, topk_group, normalise, scale, first_expert, count)
    )


def own_count(weight: object, first_expert: object, count: int | None) -> int | None:
    """Return count, by default the number of experts from first_expert on. None: the op's checks will report a wrong
    type."""
    shape = shape_of(weight)
    if count is None and shape and isinstance(first_expert, (int, torch.SymInt)):
        return shape[0] - first_expert
    return count


def _results(x: torch.Tensor, top_k: int, count: int) -> Routed:
    tokens, ints = len(x), functools.partial(x.new_empty, dtype=torch.int32)
    chosen = tokens, top_k
    experts, weights = x.new_empty(chosen, dtype=torch.int64), x.new_empty(chosen, dtype=torch.float32)
    return experts, weights, ints(tokens * top_k), ints(chosen), ints(count)


@op(
    arguments=ROUTE_TO_EXPERTS,
    reference=reference.route_to_experts,
    results=_results,
    limits={
        "T": at_most(MAX_TOKENS),
        "H": multiple_of(CHANNEL_MULTIPLE, least=CHANNEL_MULTIPLE),
        "E": at_most(MAX_EXPERTS),
        "top_k": at_most(MAX_TOP_K),
        "n_group": at_most(MAX_GROUPS),
    },
    differentiable=True,
)
def _route_to_experts(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    scores: str,
    n_group: int,
    topk_group: int,
    normalise: bool,
    scale: float,
    first_expert: int,
    count: int,
) -> Routed:
    from dsa.kernels.moe.route_to_experts_sm90 import compile_route_to_experts

    experts, weights, order, rows, ends = results = _results(x, top_k, count)
    if not len(x):
        ends.zero_()
        return results
    tile = FEW_TOKENS if len(x) <= FEW_TOKENS else TILE_TOKENS
    launch = compile_route_to_experts(
        dtype_name(x.dtype), tile, len(weight), top_k, scores, n_group, topk_group, normalise
    )
    logits = x.new_empty((len(x), len(weight)), dtype=torch.float32)
    operands = rows_at_16_bytes(x), rows_at_16_bytes(weight), bias.contiguous(), logits
    launch(*operands, experts, weights, order, rows.view(-1), ends, first_expert, float(scale))
    return results
