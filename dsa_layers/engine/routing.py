"""Routing for inference. For few tokens, one op computes the logits, the gate and the sort by expert."""

import torch

import dsa
from dsa.kernels.moe.limits import MAX_TOP_K
from dsa.kernels.moe.route_to_experts_limits import CHANNEL_MULTIPLE, MAX_EXPERTS, MAX_TOKENS
from dsa.runtime import backends
from dsa_layers.engine.batch_invariance import has_any_rows
from dsa_layers.engine.fp32_product import fp32_product, has_aligned_rows
from dsa_layers.layers.experts import ByExpert, Experts
from dsa_layers.layers.linear import HALVES
from dsa_layers.layers.moe import GroupedSigmoidRouter, SqrtSoftplusRouter

Router = GroupedSigmoidRouter | SqrtSoftplusRouter


def choose(gate: Router, x: torch.Tensor, tokens: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (experts, weights) like the router's `forward`."""
    logits = fp32_product(x, gate.weight)
    table = _table(gate)
    if table is None:
        return dsa.moe_gate(logits, _bias(gate), gate.top_k, **gate.options())
    experts = table[tokens]
    return experts, gate.weights_of(logits, experts)


def route(
    gate: Router, experts: Experts, x: torch.Tensor, tokens: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, ByExpert]:
    """Return (experts, weights, by_expert): the results of `choose`, and the result of `Experts.sort`."""
    table = _table(gate)
    own = {"first_expert": experts.first, "count": experts.count}
    if table is None and _takes("route_to_experts", x, gate.weight):
        options = gate.options()
        chosen, weights, *by_expert = dsa.route_to_experts(x, gate.weight, _bias(gate), gate.top_k, **own, **options)
    elif table is not None and table.shape[1] <= MAX_TOP_K and _takes("route_by_table", x, gate.weight):
        chosen, weights, *by_expert = dsa.route_by_table(x, gate.weight, table, tokens, scale=gate.scale, **own)
    else:
        chosen, weights = choose(gate, x, tokens)
        by_expert = experts.sort(chosen)
    return chosen, weights, tuple(by_expert)


def _table(gate: Router) -> torch.Tensor | None:
    return gate.tid2eid if isinstance(gate, SqrtSoftplusRouter) else None


def _bias(gate: Router) -> torch.Tensor:
    return gate.bias if isinstance(gate, SqrtSoftplusRouter) else gate.e_score_correction_bias


def _takes(op: str, x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether the op accepts these operands and is faster than separate ops."""
    if has_any_rows():  # this op sums logits in another order than `fp32_product`, which larger batches use
        return False
    if x.dtype != weight.dtype or x.dtype not in HALVES:
        return False
    # For more tokens PyTorch's product with the router's matrix is faster.
    few = len(x) <= MAX_TOKENS and len(weight) <= MAX_EXPERTS and x.shape[1] % CHANNEL_MULTIPLE == 0
    if not few or not has_aligned_rows(x) or not has_aligned_rows(weight):
        return False
    return not x.is_cuda or backends.runs_kernel(op, x)
