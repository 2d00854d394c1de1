"""The routed experts of a pass on DeepGEMM's grouped products and on vLLM's Marlin, as engines run them.

A pass of at least LEAST_TOKENS tokens counts as a prompt's, a smaller pass as a decoding step. FP8 experts run on
DeepGEMM. In a prompt's pass, and in a step of fewer than LEAST_MASKED tokens, the contiguous product runs: tokens are
quantised once and gathered, and each expert's rows begin at a multiple of 128, with padding rows before the next
expert's rows and padding tiles at the end. In a step of LEAST_MASKED to MOST_MASKED tokens the masked product runs:
each expert has a fixed number of rows and a count. Only steps of more than MOST_MASKED tokens run on our kernels.

FP4 experts run on DeepGEMM only in a prompt's pass. On Hopper DeepGEMM multiplies no FP4, so the weights are widened to
FP8, without loss, at the first use. In a decoding step FP4 experts run on Marlin, as in engines that run
DeepSeek-V4-Flash on Hopper. Marlin multiplies bf16 activations by FP4 weights. The weights in Marlin's layout are a
second copy of 3.4 GB per layer of V4-Flash, made at the first use. The weights widened to FP8, 6.4 GB per layer, are
then freed, because five layers with all three copies need 66 GB. Later prompts widen them again. A separate kernel adds
the shared expert's output, as in vLLM.
"""

import weakref
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch

import dsa
from dsa_bench.e2e.parts import glue
from dsa_bench.peers import marlin
from dsa_bench.peers.deep_gemm import ALIGNMENT, Scaled, sizes_of
from dsa_layers.batch.placement import WHOLE, Placement
from dsa_layers.engine.fused_moe import FusedMoE, choose
from dsa_layers.engine.joint_linear import Cast
from dsa_layers.engine.side_stream import SideStream, side_stream
from dsa_layers.layers.experts import Experts

Forward = Callable[..., torch.Tensor]
# A pass with at least this number of tokens counts as a prompt's. It runs on DeepGEMM, with FP4 weights widened to FP8.
# Engines run FP4 experts of prompts on Marlin too, with bf16 products. FP8 products have twice the rate of bf16. This
# matters for a prompt, whose experts have many rows, but not for a step, which mainly reads weights.
LEAST_TOKENS = 512
# Steps of LEAST_MASKED to MOST_MASKED tokens use the masked product. With V3.2's gate and up, 64 tokens took 1.71 ms
# (masked) and 2.08 ms (contiguous), and one token took 0.096 ms (masked) and 0.077 ms (contiguous).
LEAST_MASKED = 4
MOST_MASKED = ALIGNMENT
PROJECTIONS = ("gate_up_proj", "down_proj")
_packed: "weakref.WeakKeyDictionary[Experts, tuple[marlin.Packed, ...]]" = weakref.WeakKeyDictionary()
_widened: "weakref.WeakKeyDictionary[Experts, dict[str, Scaled]]" = weakref.WeakKeyDictionary()


class Layout(NamedTuple):
    """Rows of the contiguous product for T tokens with k experts each; with padding there are M rows. places int32 [T,
    k]: the indices of each token's rows. sources int64 [M]: the token of each row, 0 for padding. groups int32 [M]: the
    expert of each row, -1 after the last expert's rows."""

    places: torch.Tensor
    sources: torch.Tensor
    groups: torch.Tensor


def padded(experts: torch.Tensor, count: int) -> Layout:
    """Return the layout for `experts` [T, k], each token's expert ids below `count`. M is the largest number of rows,
    with padding, that T, k and `count` allow. So the host knows M without waiting for the GPU."""
    _, rows, ends = dsa.sort_by_expert(experts, count)
    with glue():
        sizes = sizes_of(ends)
        bounds = ((sizes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT).cumsum(0)
        moved = bounds.roll(1).index_fill(0, bounds.new_zeros(1), 0) - (ends - sizes)
        places = rows + moved[experts]
        groups_with_rows = min(count, experts.numel())
        most = -(-(experts.numel() + groups_with_rows * (ALIGNMENT - 1)) // ALIGNMENT) * ALIGNMENT
        tokens = torch.arange(len(experts), device=experts.device)[:, None].expand_as(experts)
        sources = tokens.new_zeros(most).scatter_(0, places.flatten(), tokens.flatten())
        groups = torch.searchsorted(bounds, torch.arange(most, device=experts.device), right=True)
        return Layout(places.int(), sources, groups.where(groups < count, -1).int())


class Slots(NamedTuple):
    """Rows of the masked product, MOST_MASKED per expert. places int64 [T, k]: the indices of each token's rows. slots
    int64 [T, k]: their indices within the expert's rows. sizes int32 [E]: the number of rows with tokens per expert."""

    places: torch.Tensor
    slots: torch.Tensor
    sizes: torch.Tensor

    @classmethod
    def of(cls, experts: torch.Tensor, count: int) -> "Slots":
        _, rows, ends = dsa.sort_by_expert(experts, count)
        with glue():
            sizes = sizes_of(ends)
            slots = rows.long() - (ends - sizes)[experts]
            return cls(experts * MOST_MASKED + slots, slots, sizes.int())

    def spread(self, q: torch.Tensor, scale: torch.Tensor, experts: torch.Tensor) -> Scaled:
        """Return (values [E, MOST_MASKED, channels], scales), the operand of the masked product. Each token's q and
        scale are copied to the token's row of each chosen expert.

        q is [T, k, channels], or [T, 1, channels] if all experts of a token get the same values. The returned scales
        are column-major. Rows without a token are not written.
        """
        count = len(self.sizes)
        rows = torch.empty(count * MOST_MASKED, q.shape[-1], dtype=q.dtype, device=q.device)
        rows.view(torch.int64)[self.places] = q.view(torch.int64)  # eight values at a time
        scales = torch.empty(count, scale.shape[-1], MOST_MASKED, dtype=scale.dtype, device=scale.device).mT
        scales[experts, self.slots] = scale
        return rows.view(count, MOST_MASKED, -1), scales


@torch.no_grad()
def weight_of(experts: Experts, name: str) -> Scaled:
    """Return (a projection's weights in FP8, their scales). The first call for a layer widens the FP4 weights of both
    projections."""
    if not experts.fp4:
        return _parameter(experts, name)
    if experts not in _widened:
        _widened[experts] = {each: dsa.widen_fp4(*_parameter(experts, each)) for each in PROJECTIONS}
    return _widened[experts][name]


def _parameter(experts: Experts, name: str) -> Scaled:
    return getattr(experts, name), getattr(experts, f"{name}_scale_inv")


def runs(experts: Experts, x: torch.Tensor, module: ModuleType | None, on_marlin: bool) -> bool:
    """Whether a peer's kernels compute the experts of a pass over x."""
    if x.dtype != torch.bfloat16 or not experts.fp8:
        return False
    if on_marlin and experts.fp4 and len(x) < LEAST_TOKENS:
        return True
    takes_steps = not experts.fp4 and len(x) <= MOST_MASKED and hasattr(module, "m_grouped_fp8_gemm_nt_masked")
    return module is not None and (len(x) >= LEAST_TOKENS or takes_steps)


def mixture_on(module: ModuleType | None, on_marlin: bool, ours: Forward) -> Forward:
    """Return a replacement of `FusedMoE.forward` that calls the experts' `forward` in passes that `runs` accepts."""

    def forward(
        self: FusedMoE,
        x: torch.Tensor,
        tokens: torch.Tensor | None = None,
        *,
        cast: Cast | None = None,
        residual: torch.Tensor | None = None,
        placement: Placement = WHOLE,
    ) -> torch.Tensor:
        if placement.is_split or not runs(self.experts, x, module, on_marlin):
            return ours(self, x, tokens, cast=cast, residual=residual, placement=placement)
        shared, side = None, SideStream()
        if self.shared_experts is not None:
            with side_stream(x, *(cast or ())) as side:
                shared = self.shared_experts.product(x, cast)
        experts, weights = choose(self.gate, x, tokens)
        side.join()
        return self.experts(x, experts, weights, shared, residual)

    return forward


def forward_on(module: ModuleType | None, on_marlin: bool, ours: Forward) -> Forward:
    """Return a replacement of `Experts.forward` that runs on the peers' kernels: on DeepGEMM's if `module` is not None,
    and on Marlin's with `on_marlin`. Passes that neither can run are passed to `ours`. It takes a residual, which is
    added to the result, in addition."""

    def forward(
        self: Experts,
        x: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        shared: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        tokens = len(x)
        if not runs(self, x, module, on_marlin):
            y = ours(self, x, experts, weights, shared)
            return y if residual is None else residual + y
        if on_marlin and self.fp4 and tokens < LEAST_TOKENS:
            out = marlin.experts_sum(x, experts, weights, *packed(self), self.limit)
            for more in (shared, residual):
                out = out if more is None else more + out
            return out

        outputs = _contiguous if tokens >= LEAST_TOKENS or tokens < LEAST_MASKED else _masked
        return dsa.combine_experts(*outputs(module, self, x, experts), weights, shared, residual)

    return forward


def _contiguous(module: ModuleType, layer: Experts, x: torch.Tensor, experts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Compute the experts with the contiguous product. Return (outputs [M, hidden], the indices of each token's rows
    int32 [T, k])."""
    layout = padded(experts, len(layer.down_proj))

    def product(q: torch.Tensor, scale: torch.Tensor, name: str) -> torch.Tensor:
        weight = weight_of(layer, name)
        out = torch.empty(len(q), weight[0].shape[1], dtype=x.dtype, device=x.device)
        with glue():  # engines' quantising kernels write this layout
            scale = module.get_mn_major_tma_aligned_tensor(scale)
        module.m_grouped_fp8_gemm_nt_contiguous((q, scale), weight, out, layout.groups)
        return out

    q, scale = dsa.per_token_cast_to_fp8(x, layer.use_ue8m0)
    q = q.view(torch.int64).index_select(0, layout.sources).view(q.dtype)  # eight values at a time
    gate, up = product(q, scale.index_select(0, layout.sources), "gate_up_proj").chunk(2, -1)
    h = dsa.swiglu_cast_to_fp8(gate, up, layer.use_ue8m0, limit=layer.limit)
    return product(*h, "down_proj"), layout.places


def _masked(module: ModuleType, layer: Experts, x: torch.Tensor, experts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Compute the experts with the masked product. Return (outputs [E * MOST_MASKED, hidden], the indices of each
    token's rows int32 [T, k])."""
    slots = Slots.of(experts, len(layer.down_proj))
    expected = max(1, -(-experts.numel() // len(layer.down_proj)))

    def product(q: torch.Tensor, scale: torch.Tensor, name: str) -> torch.Tensor:
        weight = weight_of(layer, name)
        operand = slots.spread(q, scale, experts)
        out = torch.empty(*operand[0].shape[:2], weight[0].shape[1], dtype=x.dtype, device=x.device)
        module.m_grouped_fp8_gemm_nt_masked(operand, weight, out, slots.sizes, expected)
        return out.flatten(0, 1)

    q, scale = dsa.per_token_cast_to_fp8(x, layer.use_ue8m0)
    rows = product(q[:, None], scale[:, None], "gate_up_proj").index_select(0, slots.places.flatten())
    h, scale = dsa.swiglu_cast_to_fp8(*rows.chunk(2, -1), layer.use_ue8m0, limit=layer.limit)
    k = experts.shape[1]
    return product(h.unflatten(0, (-1, k)), scale.unflatten(0, (-1, k)), "down_proj"), slots.places.int()


@torch.no_grad()
def packed(experts: Experts) -> tuple[marlin.Packed, ...]:
    """Return the layer's gate_up_proj and down_proj in Marlin's layout, which the first call makes."""
    if experts not in _packed:
        _widened.pop(experts, None)  # frees the FP8 copy
        _packed[experts] = tuple(marlin.pack(*_parameter(experts, name)) for name in PROJECTIONS)
    return _packed[experts]
