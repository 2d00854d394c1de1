"""The gate's and the sort's kernels against the references."""

import pytest
import torch

import dsa
from dsa.testing import poison_free_memory
from tests.gpu.op_checks import assert_same_bits, captured

VARIANTS = [
    {"experts": 256, "top_k": 8, "n_group": 8, "topk_group": 4, "scale": 2.5},
    {"experts": 256, "top_k": 8, "scale": 2.5},
    {"experts": 256, "top_k": 6, "scores": "sqrtsoftplus", "scale": 1.5},
    {"experts": 384, "top_k": 6, "scores": "sqrtsoftplus", "scale": 2.5},
    {"experts": 16, "top_k": 2, "n_group": 4, "topk_group": 2, "normalise": False},
    {"experts": 100, "top_k": 32, "n_group": 5, "topk_group": 3},
    {"experts": 8, "top_k": 8, "n_group": 8, "topk_group": 8, "scores": "sqrtsoftplus", "normalise": False},
    {"experts": 24, "top_k": 3, "n_group": 24, "topk_group": 3},
]
IDS = ["-".join(map(str, variant.values())) for variant in VARIANTS]


def gate(logits, bias, variant):
    return dsa.moe_gate(logits, bias, **{k: v for k, v in variant.items() if k != "experts"})


def check(logits, bias, variant, record_error=None):
    """The same experts, and their weights; where two choices are within 1e-5 of each other, either."""
    poison_free_memory(mebibytes=16)
    experts, weights = gate(logits, bias, variant)
    with dsa.use_backend("reference"):
        expected, expected_weights = gate(logits, bias, variant)
        # A change of the bias by a thousandth of that changes none of the other choices.
        shaken, _ = gate(logits, bias + 1e-5 * torch.rand_like(bias), variant)
    sure = (shaken == expected).all(1)
    assert sure.float().mean() > 0.95 or len(logits) < 50
    assert torch.equal(experts[sure], expected[sure])
    assert ((experts >= 0) & (experts < logits.shape[1])).all()
    assert all(len(set(row)) == len(row) for row in experts.tolist())
    if sure.any():
        error = ((weights - expected_weights).abs() / expected_weights.abs().clamp(min=1e-30))[sure].max()
        assert error < 2e-5
        if record_error:
            record_error(error)


@pytest.mark.parametrize("tokens", [0, 1, 3, 128, 4096])
@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
def test_gate(variant, tokens, record_error):
    experts = variant["experts"]
    check(3 * torch.randn(tokens, experts, device="cuda"), torch.randn(experts, device="cuda"), variant, record_error)


@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
def test_equal_choices_go_to_the_lowest_number(variant):
    experts = variant["experts"]
    logits = torch.randint(-2, 3, (200, experts), device="cuda").float()
    got = gate(logits, torch.zeros(experts, device="cuda"), variant)[0]
    with dsa.use_backend("reference"):
        expected = gate(logits, torch.zeros(experts, device="cuda"), variant)[0]
    assert torch.equal(got, expected)


@pytest.mark.parametrize("variant", VARIANTS[:4], ids=str)
def test_infinities_and_nan_stay_in_their_rows(variant):
    experts = variant["experts"]
    logits = torch.randn(6, experts, device="cuda")
    clean = gate(logits, torch.zeros(experts, device="cuda"), variant)
    logits[1] = -torch.inf
    logits[2, 7] = torch.nan
    logits[3] = torch.nan
    logits[4] = 200.0
    chosen, weights = gate(logits, torch.zeros(experts, device="cuda"), variant)
    for row in (0, 5):
        assert torch.equal(chosen[row], clean[0][row]) and torch.equal(weights[row], clean[1][row])
    assert ((chosen >= 0) & (chosen < experts)).all() and chosen[2, 0] == 7
    assert (weights[1] == 0).all()
    assert weights[2].isnan().any() and weights[3].isnan().all() and weights[4].isfinite().all()


@pytest.mark.parametrize(("scores", "logit"), [("sigmoid", -46.0), ("sqrtsoftplus", -86.0)])
def test_1e_20_is_added_to_the_sum(scores, logit):
    """Where the scores are not much larger than that, it shows."""
    logits, bias = torch.full((3, 256), logit, device="cuda"), torch.zeros(256, device="cuda")
    variant = {"top_k": 8, "scores": scores, "scale": 2.5}
    _, weights = gate(logits, bias, variant)
    with dsa.use_backend("reference"):
        _, expected = gate(logits, bias, variant)
    torch.testing.assert_close(weights, expected, rtol=1e-4, atol=0)
    assert (weights.sum(1) < 2.49).all()


def test_gate_of_strided_rows_repeats_itself_and_replays():
    wide, bias = torch.randn(300, 512, device="cuda"), torch.randn(256, device="cuda")
    logits = wide[:, 128:384]
    first = gate(logits.contiguous(), bias, VARIANTS[0])
    graph, found = captured(gate, logits, bias, VARIANTS[0])
    graph.replay()
    assert_same_bits(found, first)
    wide.copy_(wide.flip(0))
    graph.replay()
    assert_same_bits(found, [x.flip(0) for x in first])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("count", [1, 8, 256, 1000])
@pytest.mark.parametrize("tokens", [0, 1, 5, 128, 777, 16384])
def test_sort(tokens, count, dtype):
    experts = torch.randint(-1, count + 2, (tokens, 8), device="cuda", dtype=dtype)
    poison_free_memory(mebibytes=16)
    got = dsa.sort_by_expert(experts, count)
    with dsa.use_backend("reference"):
        expected = dsa.sort_by_expert(experts, count)
    assert all(torch.equal(a, b) for a, b in zip(got, expected))


def test_sort_of_extremes_and_replay():
    experts = torch.tensor([2**62, -(2**62), 3, 2**32 + 3, 3], device="cuda")
    graph, (order, rows, ends) = captured(dsa.sort_by_expert, experts, 4)
    graph.replay()
    assert order.tolist() == [2, 4, 0, 1, 3] and rows.tolist() == [-1, -1, 0, -1, 1]
    assert ends.tolist() == [0, 0, 0, 2]
    experts.copy_(torch.tensor([1, 0, 1, 0, 1]))
    graph.replay()
    assert order.tolist() == [1, 3, 0, 2, 4] and ends.tolist() == [2, 5, 5, 5]
