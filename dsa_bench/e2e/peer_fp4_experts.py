"""The FP4 experts of a decoding step on Marlin, as engines run DeepSeek-V4-Flash on Hopper.

Marlin multiplies bf16 activations by the weights as they are. These are laid out for it when they are first asked for,
a second copy of 3.4 GB a layer of V4-Flash. The same weights widened to FP8 for prompts, 6.4 GB a layer, are given up
then: five layers with all three copies are 66 GB. Prompts that come afterwards widen them again. The shared expert's
output is added by a kernel of its own, as vLLM does it.
"""

import weakref
from collections.abc import Callable

import torch

from dsa_bench.e2e import peer_experts
from dsa_bench.peers import marlin
from dsa_layers.layers.experts import Experts

Forward = Callable[..., torch.Tensor]
# Of a pass that widened weights are for. Engines run prompts too on Marlin, whose products are of bf16; those of FP8 do
# twice the multiply-adds in a time, which count where experts have many rows, and a step's time is its weights' bytes.
LEAST_WIDENED = 512
_packed: "weakref.WeakKeyDictionary[Experts, tuple[marlin.Packed, ...]]" = weakref.WeakKeyDictionary()


@torch.no_grad()
def packed(experts: Experts) -> tuple[marlin.Packed, ...]:
    """Its gate_up_proj and down_proj."""
    if experts not in _packed:
        peer_experts.forget(experts)
        names = peer_experts.PROJECTIONS
        _packed[experts] = tuple(marlin.pack(getattr(experts, n), getattr(experts, f"{n}_scale_inv")) for n in names)
    return _packed[experts]


def forward_on_marlin(others: Forward) -> Forward:
    """`Experts.forward` on FP4 weights; others: of all else."""

    def forward(
        self: Experts,
        x: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        shared: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if not self.fp4 or len(x) >= LEAST_WIDENED or x.dtype != torch.bfloat16:
            return others(self, x, experts, weights, shared, residual)
        out = marlin.experts_sum(x, experts, weights, *packed(self), self.limit)
        for more in (shared, residual):
            out = out if more is None else more + out
        return out

    return forward
