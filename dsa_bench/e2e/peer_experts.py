"""The routed experts of a prompt's pass on DeepGEMM's grouped products, as engines run them.

An expert's rows begin at a multiple of 128 there: a token's rows are cast once and gathered to their places, between
which there are others that mean nothing, and behind all of them whole tiles of no expert. On Hopper DeepGEMM multiplies
no FP4: such weights are in FP8 there, widened without loss when they are first asked for.
"""

import weakref
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch

import dsa
from dsa_bench.peers.deep_gemm import ALIGNMENT, Scaled
from dsa_layers.layers.experts import Experts

Forward = Callable[..., torch.Tensor]
LEAST_TOKENS = 512  # fewer have other products in engines
PROJECTIONS = ("gate_up_proj", "down_proj")
_widened: "weakref.WeakKeyDictionary[Experts, dict[str, Scaled]]" = weakref.WeakKeyDictionary()


class Layout(NamedTuple):
    """places int32 [T, k]: each token's rows; sources int64 [M]: the token of each row; groups int32 [M]: its expert,
    -1 behind the last."""

    places: torch.Tensor
    sources: torch.Tensor
    groups: torch.Tensor


def padded(experts: torch.Tensor, count: int) -> Layout:
    """Where the rows of experts [T, k] are. M follows from T and k alone: nothing waits for the GPU."""
    _, rows, ends = dsa.sort_by_expert(experts, count)
    sizes = ends.diff(prepend=ends.new_zeros(1))
    bounds = ((sizes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT).cumsum(0)
    moved = bounds.roll(1).index_fill(0, bounds.new_zeros(1), 0) - (ends - sizes)
    places = rows + moved[experts]
    most = -(-(experts.numel() + count * (ALIGNMENT - 1)) // ALIGNMENT) * ALIGNMENT
    tokens = torch.arange(len(experts), device=experts.device)[:, None].expand_as(experts)
    sources = tokens.new_zeros(most).scatter_(0, places.flatten(), tokens.flatten())
    groups = torch.searchsorted(bounds, torch.arange(most, device=experts.device), right=True)
    return Layout(places.int(), sources, groups.where(groups < count, -1).int())


@torch.no_grad()
def weight_of(experts: Experts, name: str) -> Scaled:
    """A projection's weights in FP8 and their scales."""
    if not experts.fp4:
        return getattr(experts, name), getattr(experts, f"{name}_scale_inv")
    if experts not in _widened:
        parameters = {each: (getattr(experts, each), getattr(experts, f"{each}_scale_inv")) for each in PROJECTIONS}
        _widened[experts] = {each: dsa.widen_fp4(*pair) for each, pair in parameters.items()}
    return _widened[experts][name]


def forget(experts: Experts) -> None:
    """Gives up FP4 weights in FP8, if there are any."""
    _widened.pop(experts, None)


def forward_on(module: ModuleType, ours: Forward) -> Forward:
    """`Experts.forward` for prompts on quantised weights."""

    def forward(
        self: Experts,
        x: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        shared: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if not self.fp8 or len(x) < LEAST_TOKENS or x.dtype != torch.bfloat16:
            return ours(self, x, experts, weights, shared, residual)
        layout = padded(experts, len(self.down_proj))

        def product(q: torch.Tensor, scale: torch.Tensor, name: str) -> torch.Tensor:
            weight = weight_of(self, name)
            out = torch.empty(len(q), weight[0].shape[1], dtype=x.dtype, device=x.device)
            operand = q, module.get_mn_major_tma_aligned_tensor(scale)
            module.m_grouped_fp8_gemm_nt_contiguous(operand, weight, out, layout.groups)
            return out

        q, scale = dsa.per_token_cast_to_fp8(x, self.use_ue8m0)
        q = q.view(torch.int64).index_select(0, layout.sources).view(q.dtype)  # eight numbers at a time
        gate, up = product(q, scale.index_select(0, layout.sources), "gate_up_proj").chunk(2, -1)
        h = dsa.swiglu_cast_to_fp8(gate, up, self.use_ue8m0, limit=self.limit)
        return dsa.combine_experts(product(*h, "down_proj"), layout.places, weights, shared, residual)

    return forward
