"""Few tokens are routed and sorted by one op, with the result of the router and of `Experts.sort`."""

import pytest
import torch

import dsa
from dsa_layers.engine import routing
from dsa_layers.engine.fuse import fuse
from dsa_layers.engine.routing import route
from dsa_layers.layers.experts import Experts
from dsa_layers.layers.moe import GroupedSigmoidRouter, MoE, SqrtSoftplusRouter
from tests.layers.layers.calls import record

BF16 = torch.bfloat16


@pytest.fixture
def calls(monkeypatch):
    """Names of the called ops of routing."""
    return record(monkeypatch, "route_to_experts", "route_by_table", "moe_gate", "sort_by_expert")


def grouped_router(channels=64, dtype=BF16):
    router = GroupedSigmoidRouter(channels, 12, 3, n_group=3, topk_group=2, normalise=False, scale=2.5, dtype=dtype)
    router.e_score_correction_bias.data.normal_()
    return router


def plain_router():
    router = SqrtSoftplusRouter(64, 12, 3, scale=1.5, dtype=BF16)
    router.bias.data.normal_()
    return router


def table_router(experts=12, top_k=3):
    router = SqrtSoftplusRouter(64, experts, top_k, hash_tokens=5, scale=1.5, dtype=BF16)
    router.tid2eid.data = torch.stack([torch.randperm(experts)[:top_k] for _ in range(5)])
    return router


def route_to(router, x, first=0, count=12):
    experts = Experts(count, x.shape[1], 32, dtype=x.dtype)
    experts.first, experts.total = first, 12
    return route(router, experts, x, torch.arange(len(x)) % 5)


ROUTERS = [(grouped_router, "route_to_experts"), (plain_router, "route_to_experts"), (table_router, "route_by_table")]


@pytest.mark.parametrize("count", [0, 1, 64])
@pytest.mark.parametrize(("make", "op"), ROUTERS)
@torch.no_grad()
def test_one_op_routes_and_sorts_the_entries(make, op, count, calls):
    router, x = make(), torch.randn(count, 64).to(BF16)
    experts, weights, by_expert = route_to(router, x, first=4, count=5)
    assert calls == [op]
    tokens = () if isinstance(router, GroupedSigmoidRouter) else (torch.arange(count) % 5,)
    expected = router(x, *tokens)
    assert torch.equal(experts, expected[0]) and torch.equal(weights, expected[1])
    assert all(torch.equal(a, b) for a, b in zip(by_expert, dsa.sort_by_expert(experts - 4, 5), strict=True))
    if make is table_router:
        assert torch.equal(experts, router.tid2eid[tokens[0]])


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(9, 64),
        torch.randn(65, 64).to(BF16),
        torch.randn(9, 48).to(BF16),
        torch.randn(64, 9).to(BF16).T,
    ],
    ids=["fp32", "more tokens", "channels", "columns"],
)
@torch.no_grad()
def test_other_rows_take_one_op_for_each_step(x, calls):
    route_to(grouped_router(x.shape[1], x.dtype), x)
    assert calls == ["moe_gate", "sort_by_expert"]


@torch.no_grad()
def test_a_table_with_too_many_experts_per_token_is_read_by_pytorch(calls):
    router = table_router(experts=40, top_k=33)
    route_to(router, torch.randn(4, 64).to(BF16), count=40)
    assert calls == ["sort_by_expert"]


@pytest.mark.parametrize("op", ["route_to_experts", "route_by_table"])
def test_a_gpu_without_the_kernel_does_not_take_the_op(op, monkeypatch):
    """The reference of the op would widen the router's matrix at every call."""
    x, weight = torch.randn(4, 64).to(BF16), torch.randn(12, 64).to(BF16)
    assert routing._takes(op, x, weight)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    monkeypatch.setattr(dsa.runtime.backends, "runs_kernel", lambda asked, x: asked != op)
    assert not routing._takes(op, x, weight)


def mixture(**options):
    options = {"fp8": True} | options
    return fuse(MoE(128, 256, GroupedSigmoidRouter(128, 6, 3, dtype=options.get("dtype")), **options))


def rank_of(moe, first, count):
    """Leave a rank's experts in the mixture."""
    moe.experts.count, moe.experts.first = count, first
    for name, parameter in [*moe.experts.named_parameters()]:
        part = parameter[first : first + count].clone()
        setattr(moe.experts, name, torch.nn.Parameter(part, requires_grad=False))


@pytest.mark.parametrize("fp4", [False, True])
@pytest.mark.parametrize("use_ue8m0", [False, True])
@torch.no_grad()
def test_experts_read_the_cast_of_a_single_token(fp4, use_ue8m0, monkeypatch):
    """With the bits of a cast of the experts' rows, also if this rank has only some of the experts."""
    moe, x = mixture(fp4_experts=fp4, use_ue8m0=use_ue8m0), torch.randn(1, 128)
    cast = moe.shared_experts.gate_proj.cast(x)
    expected = moe(x)
    with monkeypatch.context() as patch:
        patch.setattr(dsa, "scatter_cast_to_fp8", None)
        assert torch.equal(moe(x, cast=cast), expected)
    rank_of(moe, first=int(moe.gate(x)[0].max()) - 1, count=2)  # lacks an expert of the token
    part = moe(x)
    assert not torch.equal(part, expected)
    monkeypatch.setattr(dsa, "scatter_cast_to_fp8", None)
    assert torch.equal(moe(x, cast=cast), part)


@pytest.mark.parametrize("fp4", [False, True])
@pytest.mark.parametrize("gathered", [False, True])
@torch.no_grad()
def test_a_rank_expects_its_share_of_the_rows(gathered, fp4, monkeypatch):
    names = ["grouped_fp8_gemm_swiglu", "grouped_fp8_gemm_nt"]
    if fp4:
        names = ["grouped_fp8_fp4_gemm_swiglu", "grouped_fp8_fp4_gemm_nt"]
    found = record(monkeypatch, *names, seen=lambda *_, expected_rows, **__: expected_rows)
    moe, x, weights = mixture(fp4_experts=fp4, n_shared=0), torch.randn(7, 128), torch.rand(7, 2)
    chosen = torch.rand(7, 6).argsort(-1)[:, :2]
    own = (chosen >= 2) & (chosen < 4)

    def run(weights):
        by_expert = moe.experts.sort(chosen)
        outputs = moe._outputs(x, dsa.per_token_cast_to_fp8(x, True) if gathered else None, by_expert, 2)
        return dsa.combine_experts(outputs, by_expert[1], weights)

    expected = run(weights * own)
    rank_of(moe, first=2, count=2)
    assert torch.equal(run(weights), expected)
    assert found == [None, None, 5, 5]  # a third of 14 rows


@pytest.mark.parametrize("fp8", [True, False])
@torch.no_grad()
def test_the_residual_is_added_to_the_rounded_sum(fp8):
    moe, x = mixture(fp8=fp8, dtype=BF16), torch.randn(9, 128).to(BF16)
    residual = torch.randn_like(x)
    assert torch.equal(moe(x, residual=residual), residual + moe(x))
    shared = moe.shared_experts
    assert torch.equal(shared(x, residual=residual), residual + shared(x))
    if fp8:
        cast = shared.gate_proj.cast(x)
        assert torch.equal(shared(x, cast=cast), shared(x)) and torch.equal(moe(x, cast=cast), moe(x))
