"""`SwiGLU`, `MoE` and routing for inference."""

from typing import Self

import torch

import dsa
from dsa.kernels.moe.limits import MAX_TOP_K
from dsa.kernels.moe.route_to_experts_limits import CHANNEL_MULTIPLE, MAX_EXPERTS, MAX_TOKENS
from dsa.runtime import backends
from dsa_layers.batch.placement import WHOLE, Placement
from dsa_layers.engine import joint_linear
from dsa_layers.engine.fp32_product import fp32_product, has_aligned_rows, has_any_rows
from dsa_layers.engine.joint_linear import Cast, Layer
from dsa_layers.engine.side_stream import SideStream, side_stream
from dsa_layers.layers.experts import ByExpert, Experts, gated
from dsa_layers.layers.linear import HALVES, BlockFP8Linear
from dsa_layers.layers.moe import GroupedSigmoidRouter, MoE, SoftmaxRouter, SqrtSoftplusRouter, SwiGLU
from dsa_layers.parallel.ranks import Ranks


class FusedSwiGLU(SwiGLU):
    """`SwiGLU` for inference.

    forward(x [T, hidden], cast=None, residual=None, placement=WHOLE) -> y, or residual + y, [T, hidden].

    cast       x in FP8 with scales, from `norm_and_cast`, for the layers in `joint_layers`
    placement  the placement of the rows of x, cast, residual and the result; y is summed over the placement's ranks
    part       for a shared expert of a model on several ranks: a copy with this rank's channels (`rank_part`)
    part_of_ranks  the ranks that have such copies
    """

    part: Self | None = None
    part_of_ranks: Ranks | None = None

    def forward(
        self,
        x: torch.Tensor,
        *,
        cast: Cast | None = None,
        residual: torch.Tensor | None = None,
        placement: Placement = WHOLE,
    ) -> torch.Tensor:
        if cast is None:
            (x,) = placement.all_gather(x)
        else:
            cast = placement.all_gather(*cast)
        y = placement.reduce(self.product(x, cast))
        return y if residual is None else residual + y

    def product(self, x: torch.Tensor, cast: Cast | None) -> torch.Tensor:
        """Return this rank's y for the rows of `cast`, or of x if `cast` is None, in the dtype of x."""
        gate, up = joint_linear.multiply(x, *self.joint_layers(), cast=cast)
        if isinstance(self.down_proj, BlockFP8Linear):
            h = dsa.swiglu_cast_to_fp8(gate, up, self.down_proj.use_ue8m0, limit=self.limit, pad_scales=True)
            return self.down_proj.multiply(h, x.dtype)
        return self.down_proj(gated(gate.float(), up.float(), self.limit).to(x.dtype))

    def joint_layers(self) -> tuple[Layer, ...]:
        """Return the layers that can multiply x in one product (`join`)."""
        return self.gate_proj, self.up_proj


class FusedMoE(MoE):
    """`MoE` for inference.

    forward(x, tokens=None, cast=None, residual=None, placement=WHOLE) -> y, or residual + y, [T, hidden].

    tokens  the token ids of all rows, for a router that chooses experts by the token id
    cast, residual, placement  see `FusedSwiGLU`

    With several ranks, each rank has some of the routed experts. If `placement` is sharded, a rank computes the whole
    shared expert for its local rows. Otherwise it computes some channels of the shared expert for all rows.
    """

    def forward(
        self,
        x: torch.Tensor,
        tokens: torch.Tensor | None = None,
        *,
        cast: Cast | None = None,
        residual: torch.Tensor | None = None,
        placement: Placement = WHOLE,
    ) -> torch.Tensor:
        if placement.sharded:
            return self._sharded(x, tokens, cast, residual, placement)
        shared, side = None, SideStream()
        if self.shared_experts is not None:
            with side_stream(x, *(cast or ())) as side:
                shared = (self.shared_experts.part or self.shared_experts).product(x, cast)
        experts, weights, by_expert = route(self.gate, self.experts, x, tokens)
        outputs = self._outputs(x, cast if len(x) == 1 else None, by_expert, experts.shape[1])
        side.join()
        if not placement.is_split:
            return dsa.combine_experts(outputs, by_expert[1], weights, shared, residual)
        y = placement.reduce_experts(outputs, by_expert[1], weights, shared)
        return y if residual is None else residual + y

    def joint_layers(self) -> tuple[Layer, ...]:
        """Return `joint_layers` of the shared expert; () without a shared expert."""
        return () if self.shared_experts is None else self.shared_experts.joint_layers()

    def _sharded(
        self,
        x: torch.Tensor,
        tokens: torch.Tensor | None,
        cast: Cast | None,
        residual: torch.Tensor | None,
        placement: Placement,
    ) -> torch.Tensor:
        """Compute `forward` for sharded x. Exchanges of rows overlap with the router and with the shared expert."""
        gathering = placement.start_all_gather(*((x,) if cast is None else cast))
        choosing = placement.start_all_gather(
            *choose(self.gate, x, None if tokens is None else placement.local_cached(tokens))
        )
        every, (experts, weights) = gathering(), choosing()
        by_expert = self.experts.sort(experts)
        if cast is None:
            outputs = self._outputs(*every, None, by_expert, experts.shape[1])
        else:
            outputs = self._outputs(x, every, by_expert, experts.shape[1])
        total = placement.start_reduce(dsa.combine_experts(outputs, by_expert[1], weights))
        shared = None if self.shared_experts is None else self.shared_experts.product(x, cast)
        return total(shared, residual)

    def _outputs(self, x: torch.Tensor, cast: Cast | None, by_expert: ByExpert, top_k: int) -> torch.Tensor:
        """Compute `Experts.outputs`. If `cast` (rows in FP8 with scales) is given, FP8 experts read it instead of x."""
        if cast is None or not self.experts.fp8:
            return self.experts.outputs(x, by_expert, top_k)
        order, _, ends = by_expert
        if len(cast[0]) == 1:
            # All rows are copies of one token, so no gather by `order` is needed.
            return self.experts.products(tuple(part.expand(len(order), -1) for part in cast), ends, x.dtype)
        return self.experts.products(cast, ends, x.dtype, order // top_k)


Router = GroupedSigmoidRouter | SqrtSoftplusRouter | SoftmaxRouter


def choose(gate: Router, x: torch.Tensor, tokens: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (experts, weights), as `forward` of the router does. tokens: the token ids of x's rows, which only a
    router with a table reads."""
    logits = fp32_product(x, gate.weight)
    if isinstance(gate, SoftmaxRouter):
        return gate.choose(logits)
    table = _table(gate)
    if table is None:
        return dsa.moe_gate(logits, _bias(gate), gate.top_k, **gate.options())
    experts = table[tokens]
    return experts, gate.weights_of(logits, experts)


def route(
    gate: Router, experts: Experts, x: torch.Tensor, tokens: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, ByExpert]:
    """Return (experts, weights, by_expert): the two results of `choose`, and the result of `Experts.sort`."""
    table = _table(gate)
    own = {"first_expert": experts.first, "count": experts.count}
    has_op = not isinstance(gate, SoftmaxRouter)
    if has_op and table is None and _takes("route_to_experts", x, gate.weight):
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
    """Return whether `route` calls the op named `op` in this pass. On a GPU without the op's kernel, return False."""
    if has_any_rows():  # larger passes use separate ops, which may give a row other bits
        return False
    if x.dtype != weight.dtype or x.dtype not in HALVES:
        return False
    few = len(x) <= MAX_TOKENS and len(weight) <= MAX_EXPERTS and x.shape[1] % CHANNEL_MULTIPLE == 0
    if not few or not has_aligned_rows(x) or not has_aligned_rows(weight):
        return False
    return not x.is_cuda or backends.runs_kernel(op, x)
