"""The gate and the sort by expert, beside what they say in words."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dsa
from dsa.reference import moe_gate, sort_by_expert
from tests.reference.common import assert_refused


@pytest.mark.parametrize("n_group, topk_group", [(1, 1), (4, 2), (4, 4), (8, 3)])
@pytest.mark.parametrize("scores", ["sigmoid", "sqrtsoftplus"])
def test_gate_by_enumeration(scores, n_group, topk_group):
    torch.manual_seed(n_group)
    logits, bias = torch.randn(5, 16), torch.randn(16)
    experts, weights = moe_gate(
        logits, bias, 4, scores=scores, n_group=n_group, topk_group=topk_group, normalise=False, scale=1.5
    )
    s = torch.sigmoid(logits) if scores == "sigmoid" else torch.log1p(logits.exp()).sqrt()
    size = 16 // n_group
    for row, own, picks, ws in zip(s, s + bias, experts, weights):
        groups = [sorted(own[g * size : (g + 1) * size].tolist())[-2:] for g in range(n_group)]
        best = max(itertools.combinations(range(n_group), topk_group), key=lambda c: sum(sum(groups[g]) for g in c))
        allowed = sorted((e for e in range(16) if e // size in best), key=lambda e: -own[e])
        assert picks.tolist() == allowed[:4]
        assert torch.allclose(ws, 1.5 * row[picks])


def test_equal_ones_by_number_and_weights_by_their_sum():
    experts, weights = moe_gate(torch.zeros(1, 8), torch.zeros(8), 3, n_group=4, topk_group=2)
    assert experts.tolist() == [[0, 1, 2]] and torch.allclose(weights, torch.full((1, 3), 1 / 3))


@pytest.mark.parametrize("scores", ["sigmoid", "sqrtsoftplus"])
def test_scores_of_0_have_weights_of_0(scores):
    """The sum that they are divided by is never 0."""
    logits = torch.full((2, 8), -torch.inf)
    logits[1, 2] = 0.0
    bias = torch.tensor([0.0, 3.0, -3.0, 2.0, 0.0, 0.0, 0.0, 0.0])
    experts, weights = moe_gate(logits, bias, 2, scores=scores, scale=2.5)
    assert experts.tolist() == [[1, 3], [1, 3]] and weights.tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize("scores", ["sigmoid", "sqrtsoftplus"])
def test_1e_20_is_added_to_the_sum(scores):
    """Where the scores are not much larger than that, it shows."""
    logits = torch.full((1, 8), -46.0 if scores == "sigmoid" else -86.0)
    s = logits.double().exp() ** (1 if scores == "sigmoid" else 0.5)
    _, weights = moe_gate(logits, torch.zeros(8), 2, scores=scores, scale=2.5)
    torch.testing.assert_close(weights.double(), (2.5 * s / (2 * s + 1e-20))[:, :2], rtol=1e-5, atol=0)
    assert 1 < weights.sum() < 2.48


def test_gate_gives_gradients():
    logits = torch.randn(3, 8, dtype=torch.float32, requires_grad=True)
    moe_gate(logits, torch.zeros(8), 2)[1].square().sum().backward()
    assert (logits.grad != 0).sum(1).tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"logits": torch.zeros(2, 8, dtype=torch.bfloat16)}, "logits: dtype must be float32, got bfloat16"),
        ({"bias": torch.zeros(7)}, r"bias: shape must be \[8\], got \[7\]"),
        ({"scores": "softmax"}, "scores: must be 'sigmoid' or 'sqrtsoftplus', got 'softmax'"),
        ({"n_group": 3}, "n_group: must divide the 8 experts of logits, got 3"),
        ({"n_group": 4, "topk_group": 5}, "topk_group: must be from 1 to n_group=4, got 5"),
        (
            {"n_group": 4, "top_k": 3},
            "top_k: must be from 1 to the 2 experts of logits in the topk_group=1 of n_group=4 groups that stay, got 3",
        ),
        ({"top_k": 0}, "top_k: must be at least 1, got 0"),
    ],
)
def test_wrong_arguments_of_the_gate_are_named(change, message):
    assert_refused(message, dsa.moe_gate, **{"logits": torch.zeros(2, 8), "bias": torch.zeros(8), "top_k": 2} | change)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_sort(dtype):
    experts = torch.tensor([[3, 0], [9, 3], [-2, 1]], dtype=dtype)
    order, rows, ends = sort_by_expert(experts, 5)
    assert order.tolist() == [1, 5, 0, 3, 2, 4]
    assert rows.tolist() == [[2, 0], [-1, 3], [-1, 1]]
    assert ends.tolist() == [1, 2, 2, 4, 4]
    assert all(x.dtype == torch.int32 for x in (order, rows, ends))


@settings(max_examples=60, deadline=None)
@given(
    experts=st.lists(st.sampled_from([*range(-2, 8), 2**40, -(2**62)]), max_size=24),
    begin=st.integers(0, 6),
    count=st.integers(1, 6),
)
def test_entries_without_an_expert_are_behind_all_others(experts, begin, count):
    """As of a process that has the experts from `begin` on, `count` of them: theirs and those of nobody have no row."""
    own = torch.tensor(experts, dtype=torch.int64) - begin
    order, rows, ends = sort_by_expert(own, count)
    has_expert = (own >= 0) & (own < count)
    used = int(has_expert.sum())
    assert ends[-1] == used and (ends.diff() >= 0).all() and ends[0] >= 0
    assert has_expert[order[:used].long()].all() and not has_expert[order[used:].long()].any()
    assert rows[~has_expert].eq(-1).all()
    assert torch.equal(rows[order[:used].long()], torch.arange(used, dtype=torch.int32))
    assert torch.equal(order[used:].long(), (~has_expert).nonzero().flatten())
    begins = [0, *ends.tolist()]
    for e in range(count):
        assert torch.equal(order[begins[e] : begins[e + 1]].long(), (own == e).nonzero().flatten())


def test_sort_of_nothing_and_errors():
    order, rows, ends = sort_by_expert(torch.empty(0, 2, dtype=torch.int64), 3)
    assert order.shape == (0,) and rows.shape == (0, 2) and ends.tolist() == [0, 0, 0]
    assert_refused("experts: dtype must be int32 or int64, got float32", dsa.sort_by_expert, torch.zeros(3), 3)
    assert_refused("count: must be at least 1, got 0", dsa.sort_by_expert, torch.zeros(3, dtype=torch.int32), 0)
