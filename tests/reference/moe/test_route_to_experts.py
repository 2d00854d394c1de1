"""Router, gate and sort in one, beside the three by themselves."""

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.reference import route_to_experts
from tests.reference.common import assert_refused

(CASE,) = cases_of("route_to_experts")


def inputs(tokens=5, channels=64, experts=12, dtype=torch.bfloat16):
    torch.manual_seed(tokens)
    return torch.randn(tokens, channels).to(dtype), torch.randn(experts, channels).to(dtype), torch.randn(experts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("first, count", [(0, None), (4, 4), (9, None)])
def test_against_float64(first, count, tokens, dtype):
    groups = {"scores": "sqrtsoftplus", "n_group": 3, "topk_group": 2, "first_expert": first, "count": count}
    CASE.verify(tokens=tokens, channels=64, experts=12, top_k=3, dtype=dtype, **groups)


def test_gradients_flow_through_the_weights():
    x, weight, bias = inputs(4)
    x.requires_grad_(), weight.requires_grad_()
    _, weights, order, rows, ends = route_to_experts(x, weight, bias, 2, normalise=False)
    weights.square().sum().backward()
    assert x.grad.abs().sum() > 0 and weight.grad.abs().sum() > 0
    assert not any(found.requires_grad for found in (order, rows, ends))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": [1.0]}, "x: must be a torch.Tensor, got list"),
        ({"x": torch.zeros(5, 64)}, "x: dtype must be bfloat16 or float16, got float32"),
        ({"weight": torch.zeros(12, 64)}, "weight: dtype must be .* got float32"),
        ({"weight": torch.zeros(12, 64).half()}, "weight: dtype must be x's bfloat16, got float16"),
        ({"weight": torch.zeros(12, 32).bfloat16()}, r"weight: shape must be \[E, 64\], got \[12, 32\]"),
        ({"weight": torch.zeros(()).bfloat16()}, r"weight: shape must be \[E, 64\], got \[\]"),
        ({"bias": torch.zeros(11)}, r"bias: shape must be \[12\], got \[11\]"),
        (
            {"top_k": 13},
            "top_k: must be from 1 to the 12 experts of weight in the topk_group=1 of n_group=1",
        ),
        ({"n_group": 5}, "n_group: must divide the 12 experts of weight, got 5"),
        ({"n_group": 2, "topk_group": 3}, "topk_group: must be from 1 to n_group=2, got 3"),
        ({"scores": "softmax"}, "scores: must be 'sigmoid' or 'sqrtsoftplus', got 'softmax'"),
        ({"first_expert": -1}, "first_expert: must be at least 0, got -1"),
        ({"first_expert": "4"}, "first_expert: must be an int, got str"),
        ({"first_expert": 12}, "count: must be at least 1, got 0"),
        ({"first_expert": 8, "count": 5}, "count: must be at most 4, the experts of weight from first_exp"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    x, weight, bias = inputs()
    assert_refused(message, dsa.route_to_experts, **{"x": x, "weight": weight, "bias": bias, "top_k": 2} | change)
