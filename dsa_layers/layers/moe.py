"""SwiGLU MLP, the routers and the mixture of experts."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

import dsa
from dsa_layers.batch.rows import ALL_ROWS, Rows
from dsa_layers.layers import joint_linear
from dsa_layers.layers.branch import Branch, side_stream
from dsa_layers.layers.experts import Experts, gated
from dsa_layers.layers.linear import BlockFP8Linear, Linear, linear_fp32, make_linear
from dsa_layers.layers.norm_and_cast import given, takes
from dsa_layers.layers.own_part import SplitByTokens, follow_layer
from dsa_layers.layers.routing import Routed, choose, joins, may_join, route, route_by_table
from dsa_layers.layers.shares import Shares


class SwiGLU(nn.Module):
    """y = down(silu(gate(x)) * up(x)), the product in fp32. x [..., hidden] -> [..., hidden].

    forward(x, cast=None, residual=None, rows=...): cast of x, for gate and up, where the caller has it
    (`norm_and_cast`); with a residual of y's shape the result is residual + y. rows: where several processes have a
    part of the channels each; x, its cast and the result are this process's own rows then.
    limit: gate(x) is at most that, up(x) between -limit and limit; None: any.
    Parameters: {gate,up}_proj [inner, hidden], down_proj [hidden, inner], FP8 with scales if `fp8`.
    """

    shares = Shares(rows=("gate_proj", "up_proj"), columns=("down_proj",))

    def __init__(
        self,
        hidden: int,
        inner: int,
        *,
        limit: float | None = None,
        fp8: bool = False,
        dtype: torch.dtype | None = None,
        use_ue8m0: bool = True,
    ) -> None:
        super().__init__()
        self.limit = limit
        self.gate_proj = make_linear(hidden, inner, fp8=fp8, dtype=dtype, use_ue8m0=use_ue8m0)
        self.up_proj = make_linear(hidden, inner, fp8=fp8, dtype=dtype, use_ue8m0=use_ue8m0)
        self.down_proj = make_linear(inner, hidden, fp8=fp8, dtype=dtype, use_ue8m0=use_ue8m0)

    def forward(
        self,
        x: torch.Tensor,
        *,
        cast: joint_linear.Cast | None = None,
        residual: torch.Tensor | None = None,
        rows: Rows = ALL_ROWS,
    ) -> torch.Tensor:
        x, cast = gathered(x, cast, rows)
        gate, up = joint_linear.multiply(x, *self.joint_layers(), cast=cast)
        y = rows.sum(self._down(gate, up, x.dtype))
        return y if residual is None else residual + y

    def _down(self, gate: torch.Tensor, up: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if isinstance(self.down_proj, BlockFP8Linear):
            h = dsa.swiglu_cast_to_fp8(gate, up, self.down_proj.use_ue8m0, limit=self.limit)
            return self.down_proj.multiply(h, dtype)
        return self.down_proj(gated(gate.float(), up.float(), self.limit).to(dtype))

    def joint_layers(self) -> tuple[Linear | BlockFP8Linear, ...]:
        """Those that read x as one product."""
        return self.gate_proj, self.up_proj


class SharedExpert(SwiGLU, SplitByTokens):
    """The SwiGLU of a mixture that all tokens go to. Several processes have all of it: where rows are shared each
    computes y of its own, and else a part of the channels, whose sum is y.

    forward(x, cast=None, rows=...): as of `SwiGLU`, but what is a part of a sum is not added to the others'.
    """

    shares = replace(SwiGLU.shares, tokens=True)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        follow_layer(self)

    def forward(self, x: torch.Tensor, *, cast: joint_linear.Cast | None = None, rows: Rows = ALL_ROWS) -> torch.Tensor:
        return SwiGLU.forward(self if rows.shared else self.part(), x, cast=cast)


class GroupedSigmoidRouter(nn.Module):
    """Which experts a token goes to, and with what weights.

    s = sigmoid(x W^T) in fp32. Experts are chosen by s + bias: a group's score is the sum of its two best, the best
    `topk_group` of `n_group` groups stay, and the `top_k` best experts in them win. Their weights are s without the
    bias, divided by their sum plus 1e-20 if `normalise`, times `scale`.

    x [T, hidden] -> (experts int64 [T, top_k], weights fp32 [T, top_k]). route(x, first, count): these and the order of
    the entries by expert, for few tokens (`routing`), else None.
    Parameters: weight [n_experts, hidden], e_score_correction_bias fp32 [n_experts].
    Source: `Gate` of DeepSeek-V3's inference code ("noaux_tc").
    """

    def __init__(
        self,
        hidden: int,
        n_experts: int,
        top_k: int,
        *,
        n_group: int = 1,
        topk_group: int = 1,
        normalise: bool = True,
        scale: float = 1.0,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if n_experts % n_group:
            raise ValueError(f"n_group: must divide n_experts={n_experts}, got {n_group}")
        self.top_k, self.n_group, self.topk_group = top_k, n_group, topk_group
        self.normalise, self.scale = normalise, scale
        self.weight = Linear(hidden, n_experts, dtype=dtype).weight
        self.e_score_correction_bias = nn.Parameter(torch.zeros(n_experts, dtype=torch.float32), requires_grad=False)

    @joins
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return choose(x, self.weight, self.e_score_correction_bias, self.top_k, **self._options())

    def route(self, x: torch.Tensor, first: int, count: int) -> Routed | None:
        return route(x, self.weight, self.e_score_correction_bias, self.top_k, first, count, **self._options())

    def _options(self) -> dict[str, object]:
        groups = {"n_group": self.n_group, "topk_group": self.topk_group}
        return {**groups, "normalise": self.normalise, "scale": self.scale}


class SqrtSoftplusRouter(nn.Module):
    """Which experts a token goes to, and with what weights: DeepSeek-V4's.

    s = sqrt(softplus(x W^T)) in fp32; the `top_k` largest s + bias win, or with a table, `hash_tokens`, the experts
    that it names for the token. Their weights are s without the bias, divided by their sum plus 1e-20, times `scale`.

    x [T, hidden], tokens int64 [T] -> (experts int64 [T, top_k], weights fp32 [T, top_k]).
    route(x, first, count, tokens): these and the order of the entries by expert, for few tokens (`routing`), else None.
    Parameters: weight [n_experts, hidden]; bias fp32 [n_experts], or tid2eid int64 [hash_tokens, top_k].
    Source: `Gate` of DeepSeek-V4's inference code.
    """

    def __init__(
        self,
        hidden: int,
        n_experts: int,
        top_k: int,
        *,
        hash_tokens: int | None = None,
        scale: float = 1.0,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.top_k, self.scale = top_k, scale
        self.weight = Linear(hidden, n_experts, dtype=dtype).weight
        self.bias = self.tid2eid = None
        if hash_tokens is None:
            self.bias = nn.Parameter(torch.zeros(n_experts, dtype=torch.float32), requires_grad=False)
        else:
            table = torch.zeros(hash_tokens, top_k, dtype=torch.int64)
            self.tid2eid = nn.Parameter(table, requires_grad=False)

    def check_values(self) -> None:
        """Raises ValueError if the table names an expert that is not there: routing would read beyond the weights."""
        if self.tid2eid is None:
            return
        low, high = (value.item() for value in self.tid2eid.aminmax())
        if low < 0 or high >= len(self.weight):
            raise ValueError(f"tid2eid names the experts {low} to {high}; the model has 0 to {len(self.weight) - 1}")

    @joins
    def forward(self, x: torch.Tensor, tokens: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """tokens: needed where there is a table."""
        if self.tid2eid is None:
            return choose(x, self.weight, self.bias, self.top_k, scores="sqrtsoftplus", scale=self.scale)
        experts = self.tid2eid[tokens]
        weights = nn.functional.softplus(linear_fp32(x, self.weight).gather(-1, experts)).sqrt()
        return experts, weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.scale

    def route(self, x: torch.Tensor, first: int, count: int, tokens: torch.Tensor | None = None) -> Routed | None:
        if self.tid2eid is not None:
            return route_by_table(x, self.weight, self.tid2eid, tokens, first, count, self.scale)
        options = {"scores": "sqrtsoftplus", "scale": self.scale}
        return route(x, self.weight, self.bias, self.top_k, first, count, **options)


class MoE(nn.Module):
    """y = sum of the routed experts' outputs by their weights + the shared expert's output, rounded once.

    x [T, hidden], and tokens int64 [T] of all rows if the router asks for them -> [T, hidden]; cast, residual and rows
    as of `SwiGLU`, the cast for the shared expert, and of shared rows for all. Where rows are shared, the routed
    experts' outputs are summed over the processes while each computes the shared expert's of its own rows.
    Submodules by the checkpoint's names: gate, experts, shared_experts (one SwiGLU of n_shared * inner, absent if
    n_shared is 0).
    fp4_experts: with `fp8`, the routed experts' weights are FP4 (see `Experts`).
    """

    def __init__(
        self,
        hidden: int,
        inner: int,
        router: GroupedSigmoidRouter | SqrtSoftplusRouter,
        *,
        n_shared: int = 1,
        limit: float | None = None,
        fp8: bool = False,
        fp4_experts: bool = False,
        dtype: torch.dtype | None = None,
        use_ue8m0: bool = True,
    ) -> None:
        super().__init__()
        options = {"limit": limit, "fp8": fp8, "dtype": dtype, "use_ue8m0": use_ue8m0}
        self.gate = router
        self.experts = Experts(len(router.weight), hidden, inner, fp4=fp4_experts, **options)
        self.shared_experts = SharedExpert(hidden, n_shared * inner, **options) if n_shared else None

    def forward(
        self,
        x: torch.Tensor,
        tokens: torch.Tensor | None = None,
        *,
        cast: joint_linear.Cast | None = None,
        residual: torch.Tensor | None = None,
        rows: Rows = ALL_ROWS,
    ) -> torch.Tensor:
        if rows.shared:
            return self._of_own_rows(x, tokens, cast, residual, rows)
        shared, branch = None, Branch()
        if self.shared_experts is not None:
            with side_stream(x, *(cast or ())) as branch:
                shared = self.shared_experts(x, **given(cast if takes(self.shared_experts, "cast") else None))
        routed = self._route(x, tokens)
        experts, weights = self._choice(x, tokens) if routed is None else routed[:2]
        options = {} if routed is None else {"by_expert": routed[2:]}
        if len(x) == 1 and cast is not None and takes(self.experts, "cast"):
            options["cast"] = cast
        if may_join(self.experts):
            options["branch"] = branch
        else:
            branch.join()
        if not rows.parts and takes(self.experts, "residual"):
            return self.experts(x, experts, weights, shared, residual, **options)
        if rows.parts and takes(self.experts, "combine"):
            y = self.experts(x, experts, weights, shared, combine=rows.sum_of_experts, **options)
        else:
            y = rows.sum(self.experts(x, experts, weights, shared, **options))
        return y if residual is None else residual + y

    def _of_own_rows(
        self,
        x: torch.Tensor,
        tokens: torch.Tensor | None,
        cast: joint_linear.Cast | None,
        residual: torch.Tensor | None,
        rows: Rows,
    ) -> torch.Tensor:
        """`forward` of this process's own rows among all, which the routed experts read. Where they read a cast, it is
        what goes from process to process, while the router chooses."""
        gathering = rows.begin_gather(*((x,) if cast is None else cast))
        choosing = rows.begin_gather(*self._choice(x, None if tokens is None else rows.own_kept(tokens)))
        every, choice = gathering(), choosing()
        inputs, options = ((*every, *choice), {}) if cast is None else ((x, *choice), {"cast": every})
        shared = self.shared_experts
        if shared is not None and takes(shared, "rows"):
            total = rows.begin_sum(self.experts(*inputs, **options))
            return total(shared(x, **given(cast, rows)).to(x.dtype), residual)
        # What others have put in its place is given all rows, and gives its part of the sum.
        part = None if shared is None else shared(*rows.gather(x))
        y = rows.sum(self.experts(*inputs, part, **options))
        return y if residual is None else residual + y

    def _choice(self, x: torch.Tensor, tokens: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        return self.gate(x) if tokens is None else self.gate(x, tokens)

    def _route(self, x: torch.Tensor, tokens: torch.Tensor | None) -> Routed | None:
        if not may_join(self.gate) or not may_join(self.experts):
            return None
        given_tokens = () if tokens is None else (tokens,)
        return self.gate.route(x, self.experts.first, self.experts.count, *given_tokens)

    def joint_layers(self) -> tuple[Linear | BlockFP8Linear, ...]:
        """Those that read x as one product: the shared expert's."""
        return () if self.shared_experts is None else self.shared_experts.joint_layers()


def gathered(
    x: torch.Tensor, cast: joint_linear.Cast | None, rows: Rows
) -> tuple[torch.Tensor, joint_linear.Cast | None]:
    """x and its cast of all rows, but x as it is where the cast is what layers read."""
    if cast is not None:
        return x, rows.gather(*cast)
    return rows.gather(x)[0], None
