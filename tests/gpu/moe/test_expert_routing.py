"""moe_gate and sort_by_expert on the GPU: gates of models and other gates, ties, extreme scores, non-finite numbers,
and numbers that name no expert."""

import pytest
import torch

import dsa
from dsa.cases import cases_of
from tests.gpu.case_checks import by_sizes, grid, spoiled_rows, verify

GATE, SORT = cases_of("expert_routing")
ONE_GROUP = {"n_group": 1, "topk_group": 1}
VARIANTS = [
    {"experts": 256, "top_k": 8, "n_group": 8, "topk_group": 4},
    {"experts": 256, "top_k": 8, **ONE_GROUP},
    {"experts": 256, "top_k": 6, **ONE_GROUP, "scores": "sqrtsoftplus", "scale": 1.5},
    {"experts": 384, "top_k": 6, **ONE_GROUP, "scores": "sqrtsoftplus"},
    {"experts": 16, "top_k": 2, "normalise": False, "scale": 1.0},
    {"experts": 100, "top_k": 32, "n_group": 5, "topk_group": 3, "scale": 1.0},
    {"experts": 8, "top_k": 8, "n_group": 8, "topk_group": 8, "scores": "sqrtsoftplus", "normalise": False},
    {"experts": 24, "top_k": 3, "n_group": 24, "topk_group": 3, "scale": 1.0},
]


@pytest.mark.parametrize("tokens", [1, 3, 128, 4096])
@by_sizes(VARIANTS)
def test_every_gate_is_right(sizes, tokens, record_error):
    verify(GATE, sizes | {"tokens": tokens}, record_error)


@by_sizes(VARIANTS)
def test_equal_choices_go_to_the_lowest_number(sizes):
    given = GATE.arguments("cuda", tokens=200, **sizes)
    given["logits"].mul_(2).round_().clamp_(-2, 2)
    given["bias"].zero_()
    assert torch.equal(dsa.moe_gate(**given)[0], dsa.reference.moe_gate(**given)[0])


@by_sizes(VARIANTS[:4])
def test_infinities_and_nan_stay_in_their_rows(sizes):
    given = GATE.arguments("cuda", tokens=6, **sizes)
    given["bias"].zero_()
    whole = {(1,): -torch.inf, (2, 7): torch.nan, (3,): torch.nan, (4,): 200}
    chosen, weights = spoiled_rows(GATE.run, given, {("logits", *place): number for place, number in whole.items()})
    assert ((chosen >= 0) & (chosen < sizes["experts"])).all() and chosen[2, 0] == 7
    assert (weights[1] == 0).all()
    assert weights[2].isnan().any() and weights[3].isnan().all() and weights[4].isfinite().all()


@pytest.mark.parametrize(("scores", "logit"), [("sigmoid", -46.0), ("sqrtsoftplus", -86.0)])
def test_1e_20_is_added_to_the_sum(scores, logit):
    """The 1e-20 is visible only if the scores are about that small."""
    given = torch.full((3, 256), logit, device="cuda"), torch.zeros(256, device="cuda"), 8
    weights, expected = (f.moe_gate(*given, scores=scores, scale=2.5)[1] for f in (dsa, dsa.reference))
    torch.testing.assert_close(weights, expected, rtol=1e-4, atol=0)
    assert (weights.sum(1) < 2.49).all()


@by_sizes(grid(tokens=(1, 5, 128, 777, 16384), count=(1, 8, 256, 1000), dtype=(torch.int32, torch.int64)))
def test_every_sort_is_right(sizes, record_error):
    verify(SORT, sizes, record_error)


def test_numbers_beyond_32_bits_name_no_expert():
    given = {"experts": torch.tensor([[2**62, -(2**62), 3, 2**32 + 3, 3]], device="cuda"), "count": 4}
    SORT.check(given, SORT.run(given))
