"""The SwiGLU MLP, the routers, and the mixture-of-experts layer."""

import torch
from torch import nn

import dsa
from dsa.runtime.checks import integer
from dsa_layers.layers.experts import Experts, gated
from dsa_layers.layers.linear import Linear, linear_fp32, make_linear


class SwiGLU(nn.Module):
    """y = down(silu(gate(x)) * up(x)). x [..., hidden] -> y [..., hidden]. silu and the product are computed in fp32.

    limit: gate(x) is clamped to at most limit, and up(x) to [-limit, limit]; None disables clamping.
    Parameters: {gate,up}_proj [inner, hidden], down_proj [hidden, inner]. fp8, dtype, use_ue8m0: see `make_linear`.
    """

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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = gated(self.gate_proj(x).float(), self.up_proj(x).float(), self.limit)
        return self.down_proj(h.to(x.dtype))


class GroupedSigmoidRouter(nn.Module):
    """A router with sigmoid scores and groups of consecutive experts.

    s = sigmoid(x W^T), in fp32. The router ranks experts by s + bias. The score of a group is the sum of its two
    largest s + bias. The router keeps the best `topk_group` of `n_group` groups, and selects the best `top_k` experts
    in these groups. The weight of an expert is s without the bias, times `scale`. If `normalise`, the weights are first
    divided by their sum plus 1e-20.

    x [T, hidden] -> (experts int64 [T, top_k], weights fp32 [T, top_k]).
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

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = linear_fp32(x, self.weight)
        return dsa.moe_gate(logits, self.e_score_correction_bias, self.top_k, **self.options())

    def options(self) -> dict[str, object]:
        groups = {"n_group": self.n_group, "topk_group": self.topk_group}
        return {**groups, "normalise": self.normalise, "scale": self.scale}


class SqrtSoftplusRouter(nn.Module):
    """DeepSeek-V4's router with sqrt-softplus scores.

    s = sqrt(softplus(x W^T)), in fp32. The router selects the `top_k` experts with the largest s + bias. If
    `hash_tokens` is given, a table with `hash_tokens` rows, one per token id, selects the experts instead. The weight
    of an expert is s without the bias, divided by the sum of the token's weights plus 1e-20, times `scale`.

    x [T, hidden], tokens int64 [T] -> (experts int64 [T, top_k], weights fp32 [T, top_k]).
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
        """Raise ValueError if the table names an expert that does not exist: routing would read out of bounds."""
        if self.tid2eid is None:
            return
        low, high = (value.item() for value in self.tid2eid.aminmax())
        if low < 0 or high >= len(self.weight):
            raise ValueError(f"tid2eid names the experts {low} to {high}; the model has 0 to {len(self.weight) - 1}")

    def forward(self, x: torch.Tensor, tokens: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (experts, weights). tokens: token ids, required if the router has a table."""
        logits = linear_fp32(x, self.weight)
        if self.tid2eid is None:
            return dsa.moe_gate(logits, self.bias, self.top_k, **self.options())
        experts = self.tid2eid[tokens]
        return experts, self.weights_of(logits, experts)

    def options(self) -> dict[str, object]:
        return {"scores": "sqrtsoftplus", "scale": self.scale}

    def weights_of(self, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Return the weights, fp32 [T, top_k], of the experts that the table names."""
        scores = nn.functional.softplus(logits.gather(-1, experts)).sqrt()
        return scores / (scores.sum(-1, keepdim=True) + 1e-20) * self.scale


class SoftmaxRouter(nn.Module):
    """A router with softmax scores. It selects the `top_k` experts with the largest x W^T, in fp32. The weights are the
    softmax over the selected experts, times `scale`.

    x [T, hidden] -> (experts int64 [T, top_k], weights fp32 [T, top_k]).
    Parameter: weight [n_experts, hidden].
    Source: `MistralLarge4TextTopkRouter` of transformers 5, with one group of experts.
    """

    def __init__(
        self, hidden: int, n_experts: int, top_k: int, *, scale: float = 1.0, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.top_k, self.scale = integer("top_k", top_k, at_least=1, at_most=n_experts), scale
        self.weight = Linear(hidden, n_experts, dtype=dtype).weight

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.choose(linear_fp32(x, self.weight))

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (experts, weights) for the logits x W^T, fp32 [T, n_experts]. Among equal logits, the lowest experts
        are selected."""
        logits, experts = logits.sort(stable=True, dim=-1, descending=True)
        return experts[:, : self.top_k], logits[:, : self.top_k].softmax(-1) * self.scale


class MoE(nn.Module):
    """y = the weighted sum of the routed experts' outputs + the shared expert's output, rounded to x's dtype once.

    x [T, hidden], and tokens int64 [T] if the router has a table -> y [T, hidden].
    Submodules have the checkpoint's names: gate, experts, and shared_experts, which is one SwiGLU of inner size
    n_shared * inner, or None if n_shared is 0.
    limit, shared_limit: the limits (see `SwiGLU`) of the routed experts and of the shared expert.
    fp4_experts: store the routed experts' weights in FP4 (see `Experts`); requires `fp8`.
    """

    def __init__(
        self,
        hidden: int,
        inner: int,
        router: GroupedSigmoidRouter | SqrtSoftplusRouter | SoftmaxRouter,
        *,
        n_shared: int = 1,
        limit: float | None = None,
        shared_limit: float | None = None,
        fp8: bool = False,
        fp4_experts: bool = False,
        dtype: torch.dtype | None = None,
        use_ue8m0: bool = True,
    ) -> None:
        super().__init__()
        options = {"fp8": fp8, "dtype": dtype, "use_ue8m0": use_ue8m0}
        self.gate = router
        self.experts = Experts(len(router.weight), hidden, inner, limit=limit, fp4=fp4_experts, **options)
        shared = {"limit": shared_limit} | options
        self.shared_experts = SwiGLU(hidden, n_shared * inner, **shared) if n_shared else None

    def forward(self, x: torch.Tensor, tokens: torch.Tensor | None = None) -> torch.Tensor:
        experts, weights = self.gate(x) if tokens is None else self.gate(x, tokens)
        shared = None if self.shared_experts is None else self.shared_experts(x)
        return self.experts(x, experts, weights, shared)
