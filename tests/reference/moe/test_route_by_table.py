"""Router and sort by a table of experts, beside the parts by themselves."""

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.reference import route_by_table
from tests.reference.common import assert_refused

(CASE,) = cases_of("route_by_table")


def inputs(tokens=5, channels=64, experts=12, dtype=torch.bfloat16):
    torch.manual_seed(tokens)
    table = torch.stack([torch.randperm(experts)[:3] for _ in range(7)])
    x, weight = torch.randn(tokens, channels).to(dtype), torch.randn(experts, channels).to(dtype)
    return x, weight, table, torch.randint(7, (tokens,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("first, count", [(0, None), (4, 4), (9, None)])
def test_against_float64(first, count, tokens, dtype):
    CASE.verify(tokens=tokens, channels=64, experts=12, top_k=3, dtype=dtype, first_expert=first, count=count)


def test_what_is_no_expert():
    """A token without a row, and numbers of no expert: -1, of weight 0, in no row; the others' weights are of them."""
    x, weight, table, ids = inputs(4)
    table[2] = torch.tensor([12, 5, -3])
    ids = torch.tensor([7, -1, 2, 0])
    experts, weights, _, rows, ends = route_by_table(x, weight, table, ids, scale=1.5, first_expert=1)
    assert experts[:3].tolist() == [[-1] * 3, [-1] * 3, [-1, 5, -1]] and torch.equal(experts[3], table[0])
    assert weights[:3].tolist() == [[0] * 3, [0] * 3, [0, 1.5, 0]] and weights[3].sum().item() == pytest.approx(1.5)
    assert torch.equal(rows >= 0, experts >= 1) and ends[-1] == (experts >= 1).sum()
    empty = route_by_table(x, weight, table[:0], ids)
    assert (empty[0] == -1).all() and not empty[1].any() and not empty[4].any()


def test_gradients_flow_through_the_weights():
    x, weight, *rest = inputs(4)
    x.requires_grad_(), weight.requires_grad_()
    _, weights, order, rows, ends = route_by_table(x, weight, *rest)
    weights.square().sum().backward()
    assert x.grad.abs().sum() > 0 and weight.grad.abs().sum() > 0
    assert not any(found.requires_grad for found in (order, rows, ends))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": [1.0]}, "x: must be a torch.Tensor, got list"),
        ({"x": torch.zeros(5, 64)}, "x: dtype must be bfloat16 or float16, got float32"),
        ({"weight": torch.zeros(12, 64).half()}, "weight: dtype must be x's bfloat16, got float16"),
        ({"table": torch.zeros(7, 3).int()}, "table: dtype must be int64, got int32"),
        ({"tokens": torch.zeros(4).long()}, r"tokens: shape must be \[5\], got \[4\]"),
        ({"scale": "1"}, "scale: must be a number, got str"),
        ({"first_expert": -1}, "first_expert: must be at least 0, got -1"),
        ({"first_expert": 12}, "count: must be at least 1, got 0"),
        ({"first_expert": 8, "count": 5}, "count: must be at most 4, the experts of weight from first_exp"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    given = dict(zip(("x", "weight", "table", "tokens"), inputs()))
    assert_refused(message, dsa.route_by_table, **given | change)
