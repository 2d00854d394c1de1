"""The references of moe_gate and sort_by_expert: ties, scores near 0, sorts by hand, and entries without an expert."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsa.cases import cases_of
from dsa.reference import moe_gate, sort_by_expert

SORT = next(case for case in cases_of("expert_routing") if case.op == "sort_by_expert")
by_scores = pytest.mark.parametrize("scores", ["sigmoid", "sqrtsoftplus"])


def test_ties_go_to_the_lowest_numbers_and_weights_are_divided_by_their_sum():
    experts, weights = moe_gate(torch.zeros(1, 8), torch.zeros(8), 3, n_group=4, topk_group=2)
    assert experts.tolist() == [[0, 1, 2]] and torch.allclose(weights, torch.full((1, 3), 1 / 3))


@by_scores
def test_scores_of_0_have_weights_of_0(scores):
    """The divisor is not 0, because 1e-20 is added to the sum of the scores."""
    logits = torch.full((2, 8), -torch.inf)
    logits[1, 2] = 0.0
    bias = torch.tensor([0.0, 3.0, -3.0, 2.0, 0.0, 0.0, 0.0, 0.0])
    experts, weights = moe_gate(logits, bias, 2, scores=scores, scale=2.5)
    assert experts.tolist() == [[1, 3], [1, 3]] and weights.tolist() == [[0, 0], [0, 0]]


@by_scores
def test_1e_20_is_added_to_the_sum(scores):
    """The scores are so small that the added 1e-20 is visible in the weights."""
    logits = torch.full((1, 8), -46.0 if scores == "sigmoid" else -86.0)
    s = logits.double().exp() ** (1 if scores == "sigmoid" else 0.5)
    _, weights = moe_gate(logits, torch.zeros(8), 2, scores=scores, scale=2.5)
    torch.testing.assert_close(weights.double(), (2.5 * s / (2 * s + 1e-20))[:, :2], rtol=1e-5, atol=0)
    assert 1 < weights.sum() < 2.48


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("experts", "expected"),
    [
        ([[3, 0], [9, 3], [-2, 1]], [[1, 5, 0, 3, 2, 4], [[2, 0], [-1, 3], [-1, 1]], [1, 2, 2, 4, 4]]),
        ([[], []], [[], [[], []], [0] * 5]),
    ],
)
def test_sort_by_hand(experts, expected, dtype):
    found = sort_by_expert(torch.tensor(experts, dtype=dtype), 5)
    assert [x.tolist() for x in found] == expected
    assert all(x.dtype == torch.int32 for x in found)


@settings(max_examples=60, deadline=None)
@given(
    experts=st.lists(st.sampled_from([*range(-2, 8), 2**40, -(2**62)]), max_size=24),
    begin=st.integers(0, 6),
    count=st.integers(1, 6),
)
def test_entries_without_an_expert_come_last(experts, begin, count):
    """A process has `count` experts from `begin` on, as in expert parallelism."""
    call = {"experts": torch.tensor(experts, dtype=torch.int64) - begin, "count": count}
    SORT.check(call, sort_by_expert(**call))
