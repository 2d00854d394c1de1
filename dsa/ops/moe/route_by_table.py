"""Router and sort by expert in one op for few tokens. A table gives the experts of each token of the vocabulary, so no
gate chooses them."""

import functools

import torch

from dsa.kernels.moe.limits import MAX_TOP_K
from dsa.kernels.moe.route_to_experts_limits import (
    CHANNEL_MULTIPLE,
    FEW_TOKENS,
    MAX_EXPERTS,
    MAX_TOKENS,
    TILE_TOKENS,
)
from dsa.ops.moe.route_to_experts import HALVES, own_count
from dsa.reference.moe import route_by_table as reference
from dsa.runtime.declare import (
    ROWS,
    Arguments,
    Int,
    Number,
    Tensor,
    at_most,
    dtype_name,
    multiple_of,
    op,
    rows_at_16_bytes,
)

__all__ = ["route_by_table"]

INT64 = (torch.int64,)


def _check_count(weight: torch.Tensor, first_expert: int, count: int) -> None:
    experts = weight.shape[0]
    if first_expert + count > experts:
        raise ValueError(
            f"count: must be at most {experts - first_expert}, the experts of weight from first_expert on, got {count}"
        )


ROUTE_BY_TABLE = Arguments(
    rule=_check_count,
    x=Tensor("T H", HALVES, layout=ROWS),
    weight=Tensor("E H", HALVES, like="x", layout=ROWS),
    table=Tensor("V K", INT64),
    tokens=Tensor("T", INT64),
    scale=Number(),
    first_expert=Int(least=0),
    count=Int(),
)

Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def route_by_table(
    x: torch.Tensor,
    weight: torch.Tensor,
    table: torch.Tensor,
    tokens: torch.Tensor,
    *,
    scale: float = 1.0,
    first_expert: int = 0,
    count: int | None = None,
) -> Routed:
    """Look up the experts of each token in a table, compute their weights, and sort all (token, expert) entries by
    expert.

      experts[t, j] = table[tokens[t], j]
      s[t, j] = sqrt(softplus(x[t] . W[experts[t, j]])), summed in fp32
      weights[t, j] = scale s[t, j] / (sum_i s[t, i] + 1e-20)
      order, rows, ends = sort_by_expert(experts - first_expert, count)

    x             [T, H] bf16 or fp16
    weight        W [E, H] of x's dtype
    table         int64 [V, K]: the experts of each token of the vocabulary
    tokens        int64 [T]
    scale         multiplies the weights: a finite number
    first_expert  the lowest number of this process's experts
    count         how many experts this process has, first_expert + count at most E; None: E - first_expert

    Returns (experts, weights, order, rows, ends):
      experts  int64 [T, K]
      weights  fp32 [T, K]
      order    int32 [T K]: row r has entry order[r]; entry t K + j is the j-th expert of token t
      rows     int32 [T, K]: the row of each entry, or -1 for an expert of another process
      ends     int32 [count]: the rows of expert first_expert + e end before row ends[e]
    A token outside [0, V) has no experts, and numbers of the table outside [0, E) are not experts: the entries of
    `experts` are then -1, and the s and weights of these entries are 0. NaN and infinities of a token stay in that
    token. Differentiable in x and weight, through the weights: if gradients are asked for, the formula runs in PyTorch.
    Raises TypeError or ValueError for other types, dtypes, shapes, strides and devices.
    On Hopper: two kernels, where the second is launched while the first runs, and a workspace of 4 E bytes per token; T
    up to 64, E up to 512, H a multiple of 32, K up to 32, rows of x and weight at multiples of 16 bytes.
    The logits x[t] . W[e] are bit-identical to those of `route_to_experts`. So are the weights if the experts are the
    same, in the same order. Deterministic. CUDA-graph safe.
    Source: `Gate` of DeepSeek-V4's inference code, for layers with a table `tid2eid`.
    """
    count = own_count(weight, first_expert, count)
    return _route_by_table(x, weight, table, tokens, scale, first_expert, count)


def _results(x: torch.Tensor, table: torch.Tensor, count: int) -> Routed:
    ints, chosen = functools.partial(x.new_empty, dtype=torch.int32), (len(x), table.shape[1])
    experts, weights = x.new_empty(chosen, dtype=torch.int64), x.new_empty(chosen, dtype=torch.float32)
    return experts, weights, ints(chosen[0] * chosen[1]), ints(chosen), ints(count)


@op(
    arguments=ROUTE_BY_TABLE,
    reference=reference.route_by_table,
    results=_results,
    limits={
        "T": at_most(MAX_TOKENS),
        "H": multiple_of(CHANNEL_MULTIPLE, least=CHANNEL_MULTIPLE),
        "E": at_most(MAX_EXPERTS),
        "K": at_most(MAX_TOP_K, least=1),
    },
    differentiable=True,
)
def _route_by_table(
    x: torch.Tensor,
    weight: torch.Tensor,
    table: torch.Tensor,
    tokens: torch.Tensor,
    scale: float,
    first_expert: int,
    count: int,
) -> Routed:
    from dsa.kernels.moe.route_by_table_sm90 import compile_route_by_table

    experts, weights, order, rows, ends = results = _results(x, table, count)
    if not len(x):
        ends.zero_()
        return results
    tile = FEW_TOKENS if len(x) <= FEW_TOKENS else TILE_TOKENS
    launch = compile_route_by_table(dtype_name(x.dtype), tile, len(weight), table.shape[1])
    logits = x.new_empty((len(x), len(weight)), dtype=torch.float32)
    operands = rows_at_16_bytes(x), rows_at_16_bytes(weight), table.contiguous(), tokens.contiguous(), logits
    launch(*operands, experts, weights, order, rows.view(-1), ends, first_expert, float(scale))
    return results
