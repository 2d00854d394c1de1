"""The routed experts of a pass on DeepGEMM's grouped products, as engines run them.

In a prompt's pass, and in a step of very few tokens, an expert's rows begin at a multiple of 128: a token's rows are
cast once and gathered to their places, between which there are others that mean nothing, and behind all of them whole
tiles of no expert. In a step of more tokens each expert has room for as many rows and a count of them (the masked
product). On Hopper DeepGEMM multiplies no FP4: such weights are in FP8 there, widened without loss when they are first
asked for; those of steps are on Marlin (peer_fp4_experts.py).
"""

import weakref
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch

import dsa
from dsa_bench.e2e.parts import glue
from dsa_bench.peers.deep_gemm import ALIGNMENT, Scaled
from dsa_layers.layers.experts import Experts

Forward = Callable[..., torch.Tensor]
LEAST_TOKENS = 512  # of a prompt's pass
# Of a step whose experts are masked: 64 tokens of V3.2's first product took 1.71 ms so and 2.08 with rows side by side,
# one token 0.096 and 0.077.
LEAST_MASKED = 4
MOST_MASKED = ALIGNMENT
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
    with glue():
        return _layout(experts, count, rows, ends)


def _layout(experts: torch.Tensor, count: int, rows: torch.Tensor, ends: torch.Tensor) -> Layout:
    sizes = ends.diff(prepend=ends.new_zeros(1))
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
    """Each expert has MOST_MASKED rows. places int64 [T, k]: each token's rows; slots int64 [T, k]: the same within the
    expert's; sizes int32 [E]: how many of an expert's rows mean something."""

    places: torch.Tensor
    slots: torch.Tensor
    sizes: torch.Tensor

    @classmethod
    def of(cls, experts: torch.Tensor, count: int) -> "Slots":
        _, rows, ends = dsa.sort_by_expert(experts, count)
        with glue():
            sizes = ends.diff(prepend=ends.new_zeros(1))
            slots = rows.long() - (ends - sizes)[experts]
            return cls(experts * MOST_MASKED + slots, slots, sizes.int())

    def spread(self, q: torch.Tensor, scale: torch.Tensor, experts: torch.Tensor) -> Scaled:
        """Casts [T, k or 1, channels] with their scales in the experts' rows; scales column by column."""
        count = len(self.sizes)
        rows = torch.empty(count * MOST_MASKED, q.shape[-1], dtype=q.dtype, device=q.device)
        rows.view(torch.int64)[self.places] = q.view(torch.int64)  # eight numbers at a time
        scales = torch.empty(count, scale.shape[-1], MOST_MASKED, dtype=scale.dtype, device=scale.device).mT
        scales[experts, self.slots] = scale
        return rows.view(count, MOST_MASKED, -1), scales


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
    """`Experts.forward` on quantised weights."""

    def forward(
        self: Experts,
        x: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        shared: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        prompt = len(x) >= LEAST_TOKENS
        if not self.fp8 or x.dtype != torch.bfloat16 or not (prompt or _steps_on(module, self, len(x))):
            return ours(self, x, experts, weights, shared, residual)
        outputs = _contiguous if prompt or len(x) < LEAST_MASKED else _masked
        return dsa.combine_experts(*outputs(module, self, x, experts), weights, shared, residual)

    return forward


def _steps_on(module: ModuleType, experts: Experts, tokens: int) -> bool:
    """Whether a step's experts are the module's."""
    return not experts.fp4 and tokens <= MOST_MASKED and hasattr(module, "m_grouped_fp8_gemm_nt_masked")


def _contiguous(module: ModuleType, layer: Experts, x: torch.Tensor, experts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(the experts' rows, where in them each token's are)."""
    layout = padded(experts, len(layer.down_proj))

    def product(q: torch.Tensor, scale: torch.Tensor, name: str) -> torch.Tensor:
        weight = weight_of(layer, name)
        out = torch.empty(len(q), weight[0].shape[1], dtype=x.dtype, device=x.device)
        with glue():  # engines' casts write scales so
            scale = module.get_mn_major_tma_aligned_tensor(scale)
        module.m_grouped_fp8_gemm_nt_contiguous((q, scale), weight, out, layout.groups)
        return out

    q, scale = dsa.per_token_cast_to_fp8(x, layer.use_ue8m0)
    q = q.view(torch.int64).index_select(0, layout.sources).view(q.dtype)  # eight numbers at a time
    gate, up = product(q, scale.index_select(0, layout.sources), "gate_up_proj").chunk(2, -1)
    h = dsa.swiglu_cast_to_fp8(gate, up, layer.use_ue8m0, limit=layer.limit)
    return product(*h, "down_proj"), layout.places


def _masked(module: ModuleType, layer: Experts, x: torch.Tensor, experts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same of few tokens."""
    slots = Slots.of(experts, len(layer.down_proj))
    expected = max(1, -(-experts.numel() // len(layer.down_proj)))

    def product(q: torch.Tensor, scale: torch.Tensor, name: str) -> torch.Tensor:
        """Of casts [T, k or 1, channels]: the rows of all experts."""
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
