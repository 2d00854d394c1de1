"""The gate and the sort beside what their cases leave out: the models' gates, ties, NaN, extremes."""

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.testing import poison_free_memory

GATE, SORT = cases_of("expert_routing")
VARIANTS = [
    {"experts": 256, "top_k": 8, "n_group": 8, "topk_group": 4},
    {"experts": 256, "top_k": 8, "n_group": 1, "topk_group": 1},
    {"experts": 256, "top_k": 6, "n_group": 1, "topk_group": 1, "scores": "sqrtsoftplus", "scale": 1.5},
    {"experts": 384, "top_k": 6, "n_group": 1, "topk_group": 1, "scores": "sqrtsoftplus"},
    {"experts": 16, "top_k": 2, "normalise": False, "scale": 1.0},
    {"experts": 100, "top_k": 32, "n_group": 5, "topk_group": 3, "scale": 1.0},
    {"experts": 8, "top_k": 8, "n_group": 8, "topk_group": 8, "scores": "sqrtsoftplus", "normalise": False},
    {"experts": 24, "top_k": 3, "n_group": 24, "topk_group": 3, "scale": 1.0},
]
by_variant = pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(map(str, v.values())))


@pytest.mark.parametrize("tokens", [1, 3, 128, 4096])
@by_variant
def test_gate(variant, tokens, record_error):
    poison_free_memory(mebibytes=16)
    record_error(GATE.verify("cuda", tokens=tokens, **variant))


def changed(variant, tokens, **tensors):
    return GATE.arguments("cuda", tokens=tokens, **variant) | tensors


@by_variant
def test_equal_choices_go_to_the_lowest_number(variant):
    experts = variant["experts"]
    logits = torch.randint(-2, 3, (200, experts), device="cuda").float()
    given = changed(variant, 200, logits=logits, bias=torch.zeros(experts, device="cuda"))
    assert torch.equal(dsa.moe_gate(**given)[0], dsa.reference.moe_gate(**given)[0])


@pytest.mark.parametrize("variant", VARIANTS[:4], ids=str)
def test_infinities_and_nan_stay_in_their_rows(variant):
    experts = variant["experts"]
    given = changed(variant, 6, bias=torch.zeros(experts, device="cuda"))
    clean = dsa.moe_gate(**given)
    given["logits"][1], given["logits"][2, 7], given["logits"][3], given["logits"][4] = (
        -torch.inf,
        torch.nan,
        torch.nan,
        200,
    )
    chosen, weights = dsa.moe_gate(**given)
    for row in (0, 5):
        assert torch.equal(chosen[row], clean[0][row]) and torch.equal(weights[row], clean[1][row])
    assert ((chosen >= 0) & (chosen < experts)).all() and chosen[2, 0] == 7
    assert (weights[1] == 0).all()
    assert weights[2].isnan().any() and weights[3].isnan().all() and weights[4].isfinite().all()


@pytest.mark.parametrize(("scores", "logit"), [("sigmoid", -46.0), ("sqrtsoftplus", -86.0)])
def test_1e_20_is_added_to_the_sum(scores, logit):
    """It shows where the scores are not much larger than that."""
    given = torch.full((3, 256), logit, device="cuda"), torch.zeros(256, device="cuda"), 8
    _, weights = dsa.moe_gate(*given, scores=scores, scale=2.5)
    _, expected = dsa.reference.moe_gate(*given, scores=scores, scale=2.5)
    torch.testing.assert_close(weights, expected, rtol=1e-4, atol=0)
    assert (weights.sum(1) < 2.49).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("count", [1, 8, 256, 1000])
@pytest.mark.parametrize("tokens", [1, 5, 128, 777, 16384])
def test_sort(tokens, count, dtype):
    poison_free_memory(mebibytes=16)
    SORT.verify("cuda", tokens=tokens, count=count, dtype=dtype)


def test_sort_of_extremes():
    order, rows, ends = dsa.sort_by_expert(torch.tensor([2**62, -(2**62), 3, 2**32 + 3, 3], device="cuda"), 4)
    assert order.tolist() == [2, 4, 0, 1, 3] and rows.tolist() == [-1, -1, 0, -1, 1]
    assert ends.tolist() == [0, 0, 0, 2]
