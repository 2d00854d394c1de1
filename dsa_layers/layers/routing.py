"""Where the router, the gate and the order of entries by expert are one op's: for few tokens, as decoding has them.

A router's `forward` and that of the experts are then not all that happens: the router's `route` sorts too, and the
experts are given what it has sorted. So both are marked with `@joins`. Who puts another function in the place of one of
them, in a subclass or in the class, puts it there without the mark, and gets calls as ever.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.modules import module as hooks

import dsa
from dsa.kernels.moe.limits import MAX_TOP_K
from dsa.kernels.moe.route_to_experts_limits import CHANNEL_MULTIPLE, MAX_EXPERTS, MAX_TOKENS
from dsa_layers.layers.batch_invariance import has_any_rows
from dsa_layers.layers.linear import HALVES, has_aligned_rows, linear_fp32
from dsa_layers.layers.norm_and_cast import watched

Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def joins(forward: Callable) -> Callable:
    """Marks the `forward` of a router or of experts, by itself: what wraps a function takes over its attributes."""
    forward.joins = forward
    return forward


def may_join(module: nn.Module) -> bool:
    """Whether a call of the module would run a marked `forward`, and nobody else would see it. Not under torch.compile,
    which does not trace the question."""
    if (
        torch.compiler.is_compiling()
        or watched(module)
        or hooks._global_forward_hooks
        or hooks._global_forward_pre_hooks
    ):
        return False
    forward = type(module).forward
    return getattr(forward, "joins", None) is forward


def choose(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, top_k: int, **options: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """(experts, weights) of `dsa.moe_gate`, with logits x W^T in fp32."""
    return dsa.moe_gate(linear_fp32(x, weight), bias, top_k, **options)


def route(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    first: int,
    count: int,
    **options: object,
) -> Routed | None:
    """(experts, weights) as `choose` gives them, and (order, rows, ends) as `dsa.sort_by_expert` does for the `count`
    experts from number `first` on; None where no op does all of it."""
    if not _takes("route_to_experts", x, weight):
        return None
    return dsa.route_to_experts(x, weight, bias, top_k, first_expert=first, count=count, **options)


def route_by_table(
    x: torch.Tensor,
    weight: torch.Tensor,
    table: torch.Tensor,
    tokens: torch.Tensor,
    first: int,
    count: int,
    scale: float,
) -> Routed | None:
    """The same of the experts that a table names for the tokens."""
    if table.shape[1] > MAX_TOP_K or not _takes("route_by_table", x, weight):
        return None
    return dsa.route_by_table(x, weight, table, tokens, scale=scale, first_expert=first, count=count)


def _takes(op: str, x: torch.Tensor, weight: torch.Tensor) -> bool:
    if has_any_rows():  # logits of more tokens are `linear_fp32`'s, which has another order
        return False
    if torch.is_grad_enabled() or x.dtype != weight.dtype or x.dtype not in HALVES:
        return False
    # More tokens make the product with the matrix one that PyTorch's libraries are made for.
    few = len(x) <= MAX_TOKENS and len(weight) <= MAX_EXPERTS and x.shape[1] % CHANNEL_MULTIPLE == 0
    if not few or not has_aligned_rows(x) or not has_aligned_rows(weight):
        return False
    return not x.is_cuda or dsa.runtime.backends.runs_kernel(op, x)
