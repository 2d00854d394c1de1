"""Where one op routes few tokens and sorts their entries: it gives what router and experts do by themselves."""

import functools
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import dsa
from dsa_layers.layers import routing
from dsa_layers.layers.linear import linear_fp32
from dsa_layers.layers.moe import GroupedSigmoidRouter, MoE, SqrtSoftplusRouter

BF16 = torch.bfloat16


@pytest.fixture
def calls(monkeypatch):
    """The names of the ops of routing that are called."""
    seen = []

    def spy(name, op, *arguments, **options):
        seen.append(name)
        return op(*arguments, **options)

    for name in ("route_to_experts", "route_by_table", "moe_gate", "sort_by_expert"):
        monkeypatch.setattr(dsa, name, partial(spy, name, getattr(dsa, name)))
    return seen


def routers(dtype=BF16):
    torch.manual_seed(0)
    grouped = GroupedSigmoidRouter(64, 12, 3, n_group=3, topk_group=2, normalise=False, scale=2.5, dtype=dtype)
    plain = SqrtSoftplusRouter(64, 12, 3, scale=1.5, dtype=dtype)
    grouped.e_score_correction_bias.data.normal_()
    plain.bias.data.normal_()
    return grouped, plain


def rows(tokens, dtype=BF16):
    torch.manual_seed(tokens)
    return torch.randn(tokens, 64).to(dtype)


@torch.no_grad()
@pytest.mark.parametrize("tokens", [0, 1, 9, 64])
@pytest.mark.parametrize("which", [0, 1])
def test_a_router_and_the_order_of_its_entries(which, tokens):
    router, x = routers()[which], rows(tokens)
    experts, weights, *by_expert = router.route(x, 4, 5)
    expected = router(x) if which == 0 else router(x, None)
    assert all(torch.equal(a, b) for a, b in zip((experts, weights), expected))
    assert all(torch.equal(a, b) for a, b in zip(by_expert, dsa.sort_by_expert(experts - 4, 5)))


@torch.no_grad()
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("which", [0, 1])
def test_a_mixture_is_the_same(which, parts, calls):
    """All of it, and the parts that processes have."""
    moe, x, residual = MoE(64, 32, routers()[which], dtype=BF16), rows(9), rows(9)
    tokens = [] if which == 0 else [torch.zeros(9, dtype=torch.int64)]
    gate_up, down = (parameter.data.chunk(parts) for parameter in moe.experts.parameters())
    moe.experts.count = 12 // parts
    for i in range(parts):
        moe.experts.first = i * moe.experts.count
        for parameter, of_parts in zip(moe.experts.parameters(), (gate_up, down)):
            parameter.data = of_parts[i]
        calls.clear()
        found = moe(x, *tokens, residual=residual)
        assert calls == ["route_to_experts"]
        watching = moe.gate.register_forward_hook(lambda *_: None)
        assert torch.equal(found, moe(x, *tokens, residual=residual))
        assert calls[1:] == ["moe_gate", "sort_by_expert"]
        watching.remove()


class OtherRouter(GroupedSigmoidRouter):
    def forward(self, x):
        experts, weights = super().forward(x)
        return experts.flip(1), weights.flip(1)


class OtherExperts(nn.Module):
    first, count = 0, 12

    def forward(self, x, experts, weights, shared, residual=None):
        return x


@torch.no_grad()
@pytest.mark.parametrize(
    "case",
    [
        *("gradients", "fp32", "more tokens", "channels", "a hook of the experts", "another router", "other experts"),
        *("another forward of the router", "another forward of the experts", "a hook of all", "columns"),
    ],
)
def test_where_they_go_by_themselves(case, calls, monkeypatch):
    dtype = torch.float32 if case == "fp32" else BF16
    moe, x = MoE(64, 32, routers(dtype)[0], dtype=dtype), rows(65 if case == "more tokens" else 9, dtype)
    if case == "channels":
        moe, x = MoE(48, 32, GroupedSigmoidRouter(48, 12, 3, dtype=BF16), dtype=BF16), x[:, :48]
    if case == "a hook of the experts":
        moe.experts.register_forward_pre_hook(lambda *_: None)
    if case == "another router":
        moe.gate = OtherRouter(64, 12, 3, dtype=BF16)
    if case == "other experts":
        moe.experts = OtherExperts()
    if case.startswith("another forward"):
        kind = type(moe.gate if case.endswith("router") else moe.experts)
        wrapped = functools.wraps(kind.forward)(lambda self, *given, forward=kind.forward: forward(self, *given))
        monkeypatch.setattr(kind, "forward", wrapped)
    if case == "columns":
        x = x.T.contiguous().T
    hook = register_module_forward_hook(lambda *_: None) if case == "a hook of all" else None
    try:
        with torch.set_grad_enabled(case == "gradients"):
            moe(x)
    finally:
        if hook is not None:
            hook.remove()
    assert calls == ["moe_gate"] + ["sort_by_expert"] * (case != "other experts")


def table_router():
    torch.manual_seed(0)
    router = SqrtSoftplusRouter(64, 12, 3, hash_tokens=5, scale=1.5, dtype=BF16)
    router.tid2eid.data = torch.stack([torch.randperm(12)[:3] for _ in range(5)])
    return router


@torch.no_grad()
@pytest.mark.parametrize("count", [0, 1, 9, 64])
def test_a_table_and_the_order_of_its_entries(count):
    router, x, tokens = table_router(), rows(count), torch.arange(count) % 5
    experts, weights, *by_expert = router.route(x, 4, 5, tokens)
    expected = router(x, tokens)
    assert torch.equal(experts, router.tid2eid[tokens]) and torch.equal(experts, expected[0])
    assert torch.equal(weights, expected[1])
    assert all(torch.equal(a, b) for a, b in zip(by_expert, dsa.sort_by_expert(experts - 4, 5)))


@torch.no_grad()
def test_a_mixture_with_a_table_is_the_same(calls):
    """By the op; and by itself with a hook, and where there are more tokens."""
    moe = MoE(64, 32, table_router(), dtype=BF16)
    for count in (9, 65):
        x, tokens = rows(count), torch.arange(count) % 5
        calls.clear()
        found = moe(x, tokens)
        assert calls == (["route_by_table"] if count == 9 else ["sort_by_expert"])
        watching = moe.gate.register_forward_hook(lambda *_: None)
        assert torch.equal(found, moe(x, tokens)) and calls[1:] == ["sort_by_expert"]
        watching.remove()


@torch.no_grad()
def test_a_table_of_more_experts_than_the_op_takes():
    router = SqrtSoftplusRouter(64, 40, 33, hash_tokens=5, dtype=BF16)
    router.tid2eid.data = torch.arange(33).expand(5, 33).contiguous()
    assert router.route(rows(4), 0, 40, torch.arange(4)) is None


@torch.no_grad()
def test_a_gpu_without_the_kernel_goes_by_itself(monkeypatch):
    """For its reference widens the matrix at every call."""
    asked = []
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    monkeypatch.setattr(dsa.backends, "runs_kernel", lambda op, x: asked.append(op))
    assert routers()[0].route(rows(4), 0, 12) is None
    assert table_router().route(rows(4), 0, 12, torch.arange(4)) is None
    assert asked == ["route_to_experts", "route_by_table"]


@torch.no_grad()
def test_the_choice_is_the_gates():
    weight, bias = torch.randn(12, 64).to(BF16), torch.zeros(12)
    chosen = routing.choose(rows(3), weight, bias, 2)
    assert torch.equal(chosen[0], dsa.moe_gate(linear_fp32(rows(3), weight), bias, 2)[0])
