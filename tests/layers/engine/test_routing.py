"""Tests of routing, and of experts that read the caller's FP8 cast."""

import pytest
import torch

import dsa
from dsa_layers.engine import fused_moe
from dsa_layers.engine.fuse import fuse
from dsa_layers.layers.experts import Experts
from dsa_layers.layers.moe import GroupedSigmoidRouter, MoE, SqrtSoftplusRouter
from tests.layers.layers.calls import record

BF16 = torch.bfloat16


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


def rows(count, channels=64, dtype=BF16):
    return torch.randn(count, channels).to(dtype)


GATE, SORT = ["moe_gate", "sort_by_expert"], ["sort_by_expert"]
CASES = {
    "no token": (grouped_router, rows(0), ["route_to_experts"]),
    "groups": (grouped_router, rows(64), ["route_to_experts"]),
    "one group": (plain_router, rows(1), ["route_to_experts"]),
    "table": (table_router, rows(64), ["route_by_table"]),
    "more experts per token": (lambda: table_router(40, 33), rows(4), SORT),
    "fp32": (lambda: grouped_router(dtype=torch.float32), rows(9, dtype=torch.float32), GATE),
    "more tokens": (grouped_router, rows(65), GATE),
    "channels": (lambda: grouped_router(48), rows(9, 48), GATE),
    "columns": (grouped_router, rows(64, 9).T, GATE),
}


@pytest.mark.parametrize(("make", "x", "ops"), CASES.values(), ids=CASES)
@torch.no_grad()
def test_routing_gives_what_router_and_sort_give(make, x, ops, monkeypatch):
    router, tokens = make(), torch.arange(len(x)) % 5
    own = Experts(5, x.shape[1], 32, dtype=x.dtype)
    own.first, own.total = 4, len(router.weight)  # the rank has experts 4 to 8
    expected = router(x) if isinstance(router, GroupedSigmoidRouter) else router(x, tokens)
    with monkeypatch.context() as patch:
        called = record(patch, "route_to_experts", "route_by_table", "moe_gate", "sort_by_expert")
        experts, weights, by_expert = fused_moe.route(router, own, x, tokens)
    assert called == ops
    assert torch.equal(experts, expected[0]) and torch.equal(weights, expected[1])
    assert all(torch.equal(a, b) for a, b in zip(by_expert, dsa.sort_by_expert(experts - 4, 5), strict=True))


def mixture(**options):
    options = {"fp8": True} | options
    return fuse(MoE(128, 256, GroupedSigmoidRouter(128, 6, 3, dtype=options.get("dtype")), **options))


def leave_experts_of_rank(moe, first, count):
    moe.experts.count, moe.experts.first = count, first
    for name, parameter in [*moe.experts.named_parameters()]:
        part = parameter[first : first + count].clone()
        setattr(moe.experts, name, torch.nn.Parameter(part, requires_grad=False))


@pytest.mark.parametrize("fp4", [False, True])
@pytest.mark.parametrize("use_ue8m0", [False, True])
@torch.no_grad()
def test_experts_read_the_cast_of_a_single_token(fp4, use_ue8m0, monkeypatch):
    moe, x = mixture(fp4_experts=fp4, use_ue8m0=use_ue8m0), torch.randn(1, 128)
    cast, expected = moe.shared_experts.gate_proj.cast(x), moe(x)
    first = int(moe.gate(x)[0].max()) - 1  # of the token's 3 experts, the rank has the last and not all
    with monkeypatch.context() as patch:
        patch.setattr(dsa, "scatter_cast_to_fp8", None)
        assert torch.equal(moe(x, cast=cast), expected)
        leave_experts_of_rank(moe, first, count=2)
        part = moe(x, cast=cast)
    assert torch.equal(part, moe(x)) and not torch.equal(part, expected)


@torch.no_grad()
def test_a_residual_and_a_cast_change_no_bit_of_the_sum():
    moe, x, residual = mixture(dtype=BF16), rows(9, 128), rows(9, 128)
    cast = moe.shared_experts.gate_proj.cast(x)
    for layer in (moe, moe.shared_experts):
        assert torch.equal(layer(x, cast=cast, residual=residual), residual + layer(x))
