"""vLLM's gate, router and sort by expert as one op, for few tokens.

vLLM calls the gate, then the router with the gate's logits, then the experts. Here the gate computes what all three
need, and returns logits without values. Router and experts recognise its tensors by identity.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import dsa
from dsa.kernels.moe.limits import MAX_TOP_K
from dsa.kernels.moe.route_to_experts_limits import CHANNEL_MULTIPLE, MAX_EXPERTS, MAX_TOKENS
from dsa.ops.moe.expert_routing import SCORES
from dsa_engines import first_use

ROUTERS = ("GroupedTopKRouter", "FusedTopKBiasRouter")  # of DeepSeek-V3.2; of GLM-5 and DeepSeek-V4
SERVED = "dsa_serves"  # set on a layer of experts by the part `experts` when it has served it
SortedEntries = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # order, rows, ends of `dsa.sort_by_expert`


@dataclass
class Routed:
    """The router of the mixture that runs now, and what the gate computed for it."""

    router: Any = None
    logits: torch.Tensor | None = None
    experts: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    by_expert: SortedEntries | None = None


_now = Routed()


def by_expert(experts: torch.Tensor) -> SortedEntries | None:
    """Return the sorted entries of these experts, if the gate computed them."""
    return _now.by_expert if experts is _now.experts else None


def is_served(gate: Any, router: Any, x: torch.Tensor) -> bool:
    bias = router.e_score_correction_bias
    return not (
        x.dtype != torch.bfloat16
        or gate.weight.dtype != torch.bfloat16
        or getattr(gate, "bias", None) is not None
        or not gate.is_unquantized
        or len(x) > MAX_TOKENS
        or x.shape[1] % CHANNEL_MULTIPLE
        or len(gate.weight) > MAX_EXPERTS
        or router.top_k > MAX_TOP_K
        or router.scoring_func not in SCORES
        or router.num_fused_shared_experts
        or getattr(router, "skip_padding", False)
        or getattr(router, "bias_vl", None) is not None
        or getattr(router, "_hash_indices_table", None) is not None
        or bias is None
        or bias.dtype != torch.float32
    )


def forward_impl(original: Callable[..., Any]) -> Callable[..., Any]:
    """`MoERunner._forward_impl`, which calls gate, router and experts of a mixture."""

    @functools.wraps(original)
    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        shared_experts_input: torch.Tensor | None,
        input_ids: torch.Tensor | None = None,
    ) -> Any:
        global _now
        layer = self.routed_experts
        is_known = type(self.router).__name__ in ROUTERS and getattr(layer, SERVED, False)
        # Elsewhere vLLM gathers the logits of other GPUs between gate and router.
        is_gathered = self.moe_config.pcp_size > 1 or self.do_naive_dispatch_combine
        if not is_known or layer.expert_map is not None or is_gathered:
            return original(self, hidden_states, router_logits, shared_experts_input, input_ids)
        _now = Routed(self.router)
        try:
            return original(self, hidden_states, router_logits, shared_experts_input, input_ids)
        finally:
            _now = Routed()

    return forward


def gate_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """`GateLinear.forward`: the logits of the experts."""

    @functools.wraps(original)
    def forward(self: Any, x: torch.Tensor) -> Any:
        router = _now.router
        if router is None or not is_served(self, router, x) or not _is_compiled(self, router, x):
            return original(self, x)
        _now.logits = x.new_empty(len(x), len(self.weight), dtype=torch.float32)
        _now.experts, _now.weights, *by_expert = route(self, router, x)
        _now.by_expert = tuple(by_expert)
        return self._return(_now.logits)

    return forward


def compute_routing(original: Callable[..., Any]) -> Callable[..., Any]:
    """`_compute_routing` of a router: (weights fp32 [T, k], experts int64 [T, k])."""

    @functools.wraps(original)
    def compute(
        self: Any,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        indices_type: torch.dtype | None,
        *,
        input_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if router_logits is _now.logits and router_logits is not None:
            return _now.weights, _now.experts
        return original(self, hidden_states, router_logits, indices_type, input_ids=input_ids)

    return compute


def route(gate: Any, router: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return dsa.route_to_experts(
        *(x, gate.weight, router.e_score_correction_bias, router.top_k),
        scores=router.scoring_func,
        n_group=getattr(router, "num_expert_group", 1),
        topk_group=getattr(router, "topk_group", 1),
        normalise=router.renormalize,
        scale=router.routed_scaling_factor,
    )


def _is_compiled(gate: Any, router: Any, x: torch.Tensor) -> bool:
    groups = getattr(router, "num_expert_group", 1), getattr(router, "topk_group", 1)
    kind = *gate.weight.shape, router.top_k, router.scoring_func, router.renormalize, *groups
    return first_use.is_ready(
        "vllm", "routing", kind, lambda tokens: route(gate, router, x.new_zeros(tokens, x.shape[1])), MAX_TOKENS
    )
