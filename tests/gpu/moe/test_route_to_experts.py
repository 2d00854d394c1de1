"""route_to_experts (router, gate and sort in one op) on the GPU. If the router's logits are exact, the results have the
bits of the three separate kernels. Otherwise they agree within rounding."""

import pytest
import torch

import dsa
from dsa.cases import cases_of
from tests.gpu.case_checks import by_sizes, check_calls_in_a_row, check_rows_alone, grid, spoiled_rows, verify
from tests.gpu.op_checks import assert_same_bits

(CASE,) = cases_of("route_to_experts")
ONE_GROUP = {"n_group": 1, "topk_group": 1}
VARIANTS = [
    {"experts": 256, "top_k": 8, "n_group": 8, "topk_group": 4},
    {"experts": 256, "top_k": 8, **ONE_GROUP},
    {"experts": 256, "top_k": 6, "scores": "sqrtsoftplus", "scale": 1.5, **ONE_GROUP},
    {"experts": 384, "top_k": 6, "scores": "sqrtsoftplus", "scale": 1.5, **ONE_GROUP},
    {"experts": 40, "top_k": 3, "normalise": False, **ONE_GROUP},  # the last tile of experts is partly filled
    {"experts": 512, "top_k": 32, "n_group": 32, "topk_group": 8},
]
TOKENS = [1, 2, 7, 8, 9, 31, 32, 33, 50, 63, 64]
by_variant = pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(map(str, v.values())))


@by_variant
@pytest.mark.parametrize("tokens", TOKENS)
def test_every_variant_has_the_bits_of_the_three_kernels(tokens, variant, record_error):
    verify(CASE, variant | {"tokens": tokens}, record_error)


@by_sizes(
    # Slices (see dsa/cute/small_m_product.py) have no k-step, one round of loads, or several rounds.
    grid(tokens=(3, 50), channels=[32, 96, 2048, 2080, 6144, 7168, 8192, 16384], dtype=(torch.bfloat16, torch.float16)),
    *(
        grid(tokens=(1, 8, 9, 64), channels=[2048], first_expert=[first], count=[count])
        for first, count in [(0, 32), (96, 64), (224, 32), (255, 1), (7, 249)]
    ),
)
def test_every_size_has_the_bits_of_the_three_kernels(sizes, record_error):
    verify(CASE, VARIANTS[0] | sizes, record_error)


def gaussian(tokens, channels, variant):
    given = CASE.arguments("cuda", tokens=tokens, channels=32, **variant)
    x, weight = (torch.randn(n, channels, device="cuda") for n in (tokens, variant["experts"]))
    return given | {"x": x.bfloat16(), "weight": (weight / 40).bfloat16(), "bias": torch.randn_like(given["bias"])}


def check_experts(experts, by_expert, count):
    assert_same_bits(by_expert, dsa.sort_by_expert(experts, count))
    assert ((experts >= 0) & (experts < count)).all() and experts.sort(1).values.diff(dim=1).all()


@pytest.mark.parametrize("tokens", TOKENS)
@by_variant
def test_choices_further_apart_than_rounding_are_right(variant, tokens, record_error):
    given = gaussian(tokens, 7168, variant)
    experts, weights, *by_expert = CASE.run(given)
    check_experts(experts, by_expert, variant["experts"])
    expected, expected_weights, *_ = dsa.reference.route_to_experts(**given)
    # A token's choice is `sure` if it stays the same when the biases change by up to 4e-5 in either direction. Experts
    # that nearly tie change places.
    shake, sure = 4e-5 * torch.rand_like(given["bias"]), torch.ones(tokens, dtype=torch.bool, device="cuda")
    for bias in (given["bias"] + shake, given["bias"] - shake):
        sure &= (dsa.reference.route_to_experts(**given | {"bias": bias})[0] == expected).all(1)
    assert sure.float().mean() > 0.9 or tokens < 50
    assert torch.equal(experts[sure], expected[sure])
    error = ((weights - expected_weights).abs() / expected_weights.abs().clamp(min=1e-30))[sure]
    assert (error < 1e-4).all()
    record_error(error.max() if len(error) else 0.0)


@pytest.mark.parametrize("channels", [2080, 4096, 7168])
def test_a_token_does_not_depend_on_the_others(channels):
    """The numbers of tokens in `parts` select every tile. The first tokens vary, so a token has different positions in
    a tile."""
    parts = [(0, 1), (5, 1), (63, 1), (3, 8), (40, 9), (31, 33), (1, 63)]
    check_rows_alone(lambda given: CASE.run(given)[:2], gaussian(64, channels, VARIANTS[0]), ("x",), parts)


@pytest.mark.parametrize("tokens", [6, 60])
@by_variant
def test_what_is_not_finite_stays_in_its_token(variant, tokens):
    given = CASE.arguments("cuda", tokens=tokens, channels=2048, **variant)
    given["weight"][:2, 100] = torch.tensor([1, -1])
    changes = {("x", 1, 100): torch.inf, ("x", 2, 7): torch.nan, ("x", 3): 3e38, ("x", 5): -3e38}
    _, weights = spoiled_rows(lambda given: CASE.run(given)[:2], given, changes)
    assert weights[2].isnan().all()
    experts, _, *by_expert = CASE.run(given)
    check_experts(experts, by_expert, variant["experts"])


@pytest.mark.parametrize("op", ["route_to_experts", "route_by_table"])
@pytest.mark.parametrize("tokens", [1, 64])
def test_each_call_of_a_graph_waits_for_the_previous_one(op, tokens):
    (case,) = cases_of(op)
    check_calls_in_a_row(case, **case.sizes | {"tokens": tokens, "channels": 7168})
