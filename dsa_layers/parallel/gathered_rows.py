"""Rows of all ranks on each of them, with gradients: what a layer's keys are where ranks share the tokens."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from dsa_layers.parallel.ranks import Ranks


@dataclass(frozen=True)
class RowPlan:
    """Which rows a rank wants. Every rank brings up to `most` rows, and what it lacks is padding: row i of rank r is
    r * most + i among those of all.

    rows   int64 [N], on the device: the wanted ones
    first  so many of them, and likewise those behind them, are different rows: a row is wanted at most twice
    """

    rows: torch.Tensor
    first: int
    most: int


def gather_rows(x: torch.Tensor, plan: RowPlan, ranks: Ranks) -> torch.Tensor:
    """x [own, ...] of each rank -> this rank's wanted rows [N, ...] of all of them.

    A row's gradient is the sum over the ranks of their gradients of it, each of which is rounded to x's dtype, added in
    fp32 (fp64 for fp64) in the order of the ranks and rounded: the same bits in every run. All ranks must call this,
    and run backward, in one order.
    """
    return _GatherRows.apply(x, plan, ranks)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, plan: RowPlan, ranks: Ranks) -> torch.Tensor:
        ctx.plan, ctx.ranks, ctx.own = plan, ranks, len(x)
        parts = x.new_empty(ranks.size * plan.most, *x.shape[1:])
        ranks.all_gather(parts, _padded(x, plan.most))
        return parts.index_select(0, plan.rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        plan, ranks = ctx.plan, ctx.ranks
        sent = grad.new_zeros(ranks.size * plan.most, *grad.shape[1:])
        # Rows of one call are different ones, so that their order does not matter.
        for part in (slice(0, plan.first), slice(plan.first, None)):
            sent.index_add_(0, plan.rows[part], grad[part])
        parts = torch.empty_like(sent)
        ranks.all_to_all(parts, sent)
        return ranks.sum_parts(parts.unflatten(0, (ranks.size, plan.most))[:, : ctx.own]), None, None


def _padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    return x.contiguous() if len(x) == rows else torch.cat((x, x.new_zeros(rows - len(x), *x.shape[1:])))
