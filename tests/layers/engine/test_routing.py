"""Where one op routes few tokens and sorts their entries: it gives what router and experts do by themselves."""

import functools

import pytest
import torch
from torch import nn
from torch.nn.modules import module

import dsa
from dsa_layers.layers.moe import GroupedSigmoidRouter, MoE, SqrtSoftplusRouter
from tests.layers.layers.calls import record

BF16 = torch.bfloat16


@pytest.fixture
def calls(monkeypatch):
    """The names of the ops of routing that are called."""
    return record(monkeypatch, "route_to_experts", "route_by_table", "moe_gate", "sort_by_expert")


def grouped_router(dtype=BF16):
    router = GroupedSigmoidRouter(64, 12, 3, n_group=3, topk_group=2, normalise=False, scale=2.5, dtype=dtype)
    router.e_score_correction_bias.data.normal_()
    return router


def plain_router():
    router = SqrtSoftplusRouter(64, 12, 3, scale=1.5, dtype=BF16)
    router.bias.data.normal_()
    return router


def table_router():
    router = SqrtSoftplusRouter(64, 12, 3, hash_tokens=5, scale=1.5, dtype=BF16)
    router.tid2eid.data = torch.stack([torch.randperm(12)[:3] for _ in range(5)])
    return router


def given(router, count, dtype=BF16):
    """Rows, and the tokens that the router asks for."""
    x, tokens = torch.randn(count, 64).to(dtype), torch.arange(count) % 5
    return (x,) if isinstance(router, GroupedSigmoidRouter) else (x, tokens)


@torch.no_grad()
@pytest.mark.parametrize("count", [0, 1, 64])
@pytest.mark.parametrize("make", [grouped_router, plain_router, table_router])
def test_one_op_routes_and_orders_the_entries(make, count):
    router = make()
    x, *tokens = given(router, count)
    experts, weights, *by_expert = router.route(x, 4, 5, *tokens)
    expected = router(x, *tokens)
    assert torch.equal(experts, expected[0]) and torch.equal(weights, expected[1])
    assert all(torch.equal(a, b) for a, b in zip(by_expert, dsa.sort_by_expert(experts - 4, 5)))
    if make is table_router:
        assert torch.equal(experts, router.tid2eid[tokens[0]])


@torch.no_grad()
@pytest.mark.parametrize(
    ("make", "op", "by_itself"),
    [
        (grouped_router, "route_to_experts", ["moe_gate", "sort_by_expert"]),
        (plain_router, "route_to_experts", ["moe_gate", "sort_by_expert"]),
        (table_router, "route_by_table", ["sort_by_expert"]),
    ],
)
@pytest.mark.parametrize("parts", [1, 3])
def test_a_mixture_is_the_same_with_one_op(make, op, by_itself, parts, calls):
    """All of it, and the parts that processes have."""
    router = make()
    moe, (x, *tokens), residual = MoE(64, 32, router, dtype=BF16), given(router, 9), torch.randn(9, 64).to(BF16)
    gate_up, down = (parameter.data.chunk(parts) for parameter in moe.experts.parameters())
    moe.experts.count = 12 // parts
    for i in range(parts):
        moe.experts.first = i * moe.experts.count
        for parameter, of_parts in zip(moe.experts.parameters(), (gate_up, down)):
            parameter.data = of_parts[i]
        calls.clear()
        found = moe(x, *tokens, residual=residual)
        watching = moe.gate.register_forward_hook(lambda *_: None)
        assert torch.equal(found, moe(x, *tokens, residual=residual))
        assert calls == [op, *by_itself]
        watching.remove()


class OtherRouter(GroupedSigmoidRouter):
    def forward(self, x):
        experts, weights = super().forward(x)
        return experts.flip(1), weights.flip(1)


class OtherExperts(nn.Module):
    first, count = 0, 12

    def forward(self, x, experts, weights, shared, residual=None):
        return x


def wrapped(function):
    return functools.wraps(function)(lambda *given: function(*given))


@torch.no_grad()
@pytest.mark.parametrize(
    "change",
    [
        lambda moe, patch: moe.experts.register_forward_pre_hook(lambda *_: None),
        lambda moe, patch: patch.setattr(type(moe.gate), "forward", wrapped(type(moe.gate).forward)),
        lambda moe, patch: patch.setattr(type(moe.experts), "forward", wrapped(type(moe.experts).forward)),
        lambda moe, patch: patch.setitem(module._global_forward_hooks, 0, lambda *_: None),
        lambda moe, patch: setattr(moe, "gate", OtherRouter(64, 12, 3, dtype=BF16)),
    ],
    ids=["a hook", "the router's forward", "the experts' forward", "a hook of all modules", "another router"],
)
def test_what_somebody_sees_or_replaces_goes_by_itself(change, calls, monkeypatch):
    moe = MoE(64, 32, grouped_router(), dtype=BF16)
    change(moe, monkeypatch)
    moe(torch.randn(9, 64).to(BF16))
    assert calls == ["moe_gate", "sort_by_expert"]


@torch.no_grad()
def test_other_experts_are_called(calls):
    moe, x = MoE(64, 32, grouped_router(), dtype=BF16), torch.randn(9, 64).to(BF16)
    moe.experts = OtherExperts()
    assert moe(x) is x and calls == ["moe_gate"]


@pytest.mark.parametrize(
    ("x", "gradients"),
    [
        (torch.randn(9, 64).to(BF16), True),
        (torch.randn(9, 64), False),
        (torch.randn(65, 64).to(BF16), False),
        (torch.randn(9, 48).to(BF16), False),
        (torch.randn(64, 9).to(BF16).T, False),
    ],
    ids=["gradients", "fp32", "more tokens", "channels", "columns"],
)
def test_other_rows_go_by_themselves(x, gradients, calls):
    moe = MoE(x.shape[1], 32, GroupedSigmoidRouter(x.shape[1], 12, 3, dtype=x.dtype), dtype=x.dtype)
    with torch.set_grad_enabled(gradients):
        moe(x)
    assert calls == ["moe_gate", "sort_by_expert"]


@torch.no_grad()
def test_a_table_of_more_experts_than_the_op_takes():
    router = SqrtSoftplusRouter(64, 40, 33, hash_tokens=5, dtype=BF16)
    router.tid2eid.data = torch.arange(33).expand(5, 33).contiguous()
    assert router.route(torch.randn(4, 64).to(BF16), 0, 40, torch.arange(4)) is None


@torch.no_grad()
def test_a_gpu_without_the_kernel_goes_by_itself(monkeypatch):
    """For its reference widens the matrix at every call."""
    asked = []
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    monkeypatch.setattr(dsa.runtime.backends, "runs_kernel", lambda op, x: asked.append(op))
    for router in (grouped_router(), table_router()):
        x, *tokens = given(router, 4)
        assert router.route(x, 0, 12, *tokens) is None
    assert asked == ["route_to_experts", "route_by_table"]
