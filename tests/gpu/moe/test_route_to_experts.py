"""Router, gate and sort in one: of exact logits the bits of the three kernels one after the other (the cases' check),
of others within rounding."""

from itertools import product

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.testing import poison_free_memory
from tests.gpu.op_checks import assert_same_bits, captured

(CASE,) = cases_of("route_to_experts")
ONE_GROUP = {"n_group": 1, "topk_group": 1}
VARIANTS = [
    {"experts": 256, "top_k": 8, "n_group": 8, "topk_group": 4},
    {"experts": 256, "top_k": 8, **ONE_GROUP},
    {"experts": 256, "top_k": 6, "scores": "sqrtsoftplus", "scale": 1.5, **ONE_GROUP},
    {"experts": 384, "top_k": 6, "scores": "sqrtsoftplus", "scale": 1.5, **ONE_GROUP},
    {"experts": 40, "top_k": 3, "normalise": False, **ONE_GROUP},  # the last tile of experts is half there
    {"experts": 512, "top_k": 32, "n_group": 32, "topk_group": 8},
]
TOKENS = [1, 2, 7, 8, 9, 31, 32, 33, 50, 63, 64]
by_variant = pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(map(str, v.values())))


@pytest.mark.parametrize(
    ("tokens", "channels", "variant", "dtype"),
    [
        *product(TOKENS, (4096,), VARIANTS, (torch.bfloat16,)),
        # Slices of no steps, of one and of several rounds.
        *product((3, 50), (32, 96, 2048, 2080, 6144, 7168, 8192, 16384), VARIANTS[:1], (torch.bfloat16, torch.float16)),
    ],
)
def test_bits_of_the_three(tokens, channels, variant, dtype):
    poison_free_memory(mebibytes=16)
    CASE.verify("cuda", tokens=tokens, channels=channels, dtype=dtype, **variant)


@pytest.mark.parametrize("first, count", [(0, 32), (96, 64), (224, 32), (255, 1), (7, 249)])
@pytest.mark.parametrize("tokens", [1, 8, 9, 64])
def test_a_process_with_some_of_the_experts(tokens, first, count):
    CASE.verify("cuda", tokens=tokens, channels=2048, first_expert=first, count=count, **VARIANTS[0])


def gaussian(tokens, channels, variant):
    given = CASE.arguments("cuda", tokens=tokens, channels=32, **variant)
    x, weight = (torch.randn(n, channels, device="cuda") for n in (tokens, variant["experts"]))
    return given | {"x": x.bfloat16(), "weight": (weight / 40).bfloat16(), "bias": torch.randn_like(given["bias"])}


@pytest.mark.parametrize("tokens", TOKENS)
@by_variant
def test_beside_the_reference(variant, tokens, record_error):
    """Choices that are further apart than rounding, and the order of whatever was chosen."""
    given = gaussian(tokens, 7168, variant)
    poison_free_memory(mebibytes=16)
    experts, weights, *by_expert = dsa.route_to_experts(**given)
    assert_same_bits(by_expert, dsa.sort_by_expert(experts, variant["experts"]))
    expected, expected_weights, *_ = dsa.reference.route_to_experts(**given)
    # Up and down: of two that nearly tie one of these changes the order.
    shake, sure = 4e-5 * torch.rand_like(given["bias"]), torch.ones(tokens, dtype=torch.bool, device="cuda")
    for bias in (given["bias"] + shake, given["bias"] - shake):
        sure &= (dsa.reference.route_to_experts(**given | {"bias": bias})[0] == expected).all(1)
    assert sure.float().mean() > 0.9 or tokens < 50
    assert torch.equal(experts[sure], expected[sure])
    assert all(len(set(row)) == len(row) for row in experts.tolist())
    if sure.any():
        error = ((weights - expected_weights).abs() / expected_weights.abs().clamp(min=1e-30))[sure].max()
        assert error < 1e-4
        record_error(error)


@pytest.mark.parametrize("channels", [2080, 4096, 7168])
def test_bits_whatever_the_other_tokens(channels):
    """In every tile, and at every place in it."""
    given = gaussian(64, channels, VARIANTS[0])
    experts, weights, *_ = dsa.route_to_experts(**given)
    for first, tokens in ((0, 1), (5, 1), (63, 1), (3, 8), (40, 9), (31, 33), (1, 63)):
        part = slice(first, first + tokens)
        found = dsa.route_to_experts(**given | {"x": given["x"][part]})
        assert torch.equal(found[0], experts[part]) and torch.equal(found[1], weights[part])


@pytest.mark.parametrize("tokens", [6, 60])
@by_variant
def test_what_is_not_finite_stays_in_its_token(variant, tokens):
    given = CASE.arguments("cuda", tokens=tokens, channels=2048, **variant)
    x, weight = given["x"], given["weight"]
    weight[0, 100], weight[1, 100] = 1, -1
    clean = dsa.route_to_experts(**given)
    x[1, 100], x[2, 7], x[3], x[5] = torch.inf, torch.nan, 3e38, -3e38
    experts, weights, *by_expert = dsa.route_to_experts(**given)
    assert_same_bits(by_expert, dsa.sort_by_expert(experts, variant["experts"]))
    others = [t for t in range(tokens) if t not in (1, 2, 3, 5)]
    assert torch.equal(experts[others], clean[0][others]) and torch.equal(weights[others], clean[1][others])
    assert ((experts >= 0) & (experts < variant["experts"])).all() and weights[2].isnan().all()
    assert all(len(set(row)) == len(row) for row in experts.tolist())


@pytest.mark.parametrize("op", ["route_to_experts", "route_by_table"])
@pytest.mark.parametrize("tokens", [1, 64])
def test_calls_one_after_the_other(op, tokens):
    """As the layers of a model: each waits for the one before, whose memory is reused."""
    (case,) = cases_of(op)
    given = case.arguments("cuda", **case.sizes | {"tokens": tokens, "channels": 7168})
    graph, found = captured(lambda: [case.run(given) for _ in range(20)])
    for _ in range(5):
        graph.replay()
        torch.cuda.synchronize()
        for each in found:
            case.check(given, each)
