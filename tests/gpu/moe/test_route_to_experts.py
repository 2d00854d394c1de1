"""Router, gate and sort in one on the GPU: of logits that rounding does not touch exactly what the three kernels give
one after the other, of others within rounding; the sort exactly in any case."""

import math
from functools import partial
from itertools import product

import pytest
import torch

import dsa
from dsa.testing import poison_free_memory
from tests.gpu.op_checks import among_nan, assert_same_bits, replays

VARIANTS = [
    {"experts": 256, "top_k": 8, "n_group": 8, "topk_group": 4, "scale": 2.5},
    {"experts": 256, "top_k": 8, "scale": 2.5},
    {"experts": 256, "top_k": 6, "scores": "sqrtsoftplus", "scale": 1.5},
    {"experts": 384, "top_k": 6, "scores": "sqrtsoftplus", "scale": 1.5},
    {"experts": 40, "top_k": 3, "normalise": False},  # the last tile of experts is half there
    {"experts": 512, "top_k": 32, "n_group": 32, "topk_group": 8},
]
TOKENS = [1, 2, 7, 8, 9, 31, 32, 33, 50, 63, 64]
IDS = [f"{v['experts']}-{v['top_k']}-{v.get('n_group', 1)}-{v.get('scores', 'sigmoid')}" for v in VARIANTS]


def options_of(variant):
    return {name: value for name, value in variant.items() if name != "experts"}


def integers(tokens, channels, experts, dtype=torch.bfloat16):
    """Operands whose products and sums, whatever their order, are exact in fp32, with logits of about 1, some of them
    equal; and a bias."""
    x = torch.randint(-2, 3, (tokens, channels), device="cuda").to(dtype)
    weight = torch.randint(-1, 2, (experts, channels), device="cuda") * 2.0 ** -round(math.log2(channels) / 2)
    return x, weight.to(dtype), torch.randint(-3, 4, (experts,), device="cuda") / 8


def by_themselves(x, weight, bias, options, first=0, count=None):
    logits = (x.double() @ weight.double().T).float()
    experts, weights = dsa.moe_gate(logits, bias, **options)
    return experts, weights, *dsa.sort_by_expert(experts - first, len(weight) - first if count is None else count)


@pytest.mark.parametrize(
    ("tokens", "channels", "variant", "dtype"),
    [
        *product(TOKENS, (4096,), VARIANTS, (torch.bfloat16,)),
        # Slices of no steps, of one and of several rounds.
        *product((3, 50), (32, 96, 2048, 2080, 6144, 7168, 8192, 16384), VARIANTS[:1], (torch.bfloat16, torch.float16)),
    ],
)
def test_bits_of_the_three(tokens, channels, variant, dtype):
    given, options = integers(tokens, channels, variant["experts"], dtype), options_of(variant)
    poison_free_memory(mebibytes=16)
    assert_same_bits(dsa.route_to_experts(*given, **options), by_themselves(*given, options))


@pytest.mark.parametrize("first, count", [(0, 32), (96, 64), (224, 32), (255, 1), (7, 249)])
@pytest.mark.parametrize("tokens", [1, 8, 9, 64])
def test_a_process_with_some_of_the_experts(tokens, first, count):
    given, options = integers(tokens, 2048, 256), options_of(VARIANTS[0])
    poison_free_memory(mebibytes=16)
    found = dsa.route_to_experts(*given, **options, first_expert=first, count=count)
    assert_same_bits(found, by_themselves(*given, options, first, count))


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
def test_beside_the_reference(variant, tokens, record_error):
    """Choices that are further apart than rounding, and the order of whatever was chosen."""
    x, weight = torch.randn(tokens, 7168, device="cuda"), torch.randn(variant["experts"], 7168, device="cuda") / 40
    given = x.bfloat16(), weight.bfloat16(), torch.randn(variant["experts"], device="cuda")
    poison_free_memory(mebibytes=16)
    experts, weights, *by_expert = dsa.route_to_experts(*given, **options_of(variant))
    assert_same_bits(by_expert, dsa.sort_by_expert(experts, variant["experts"]))
    with dsa.use_backend("reference"):
        expected, expected_weights, *_ = dsa.route_to_experts(*given, **options_of(variant))
        # Up and down: of two that nearly tie one of these changes the order.
        shake, sure = 4e-5 * torch.rand_like(given[2]), torch.ones(tokens, dtype=torch.bool, device="cuda")
        for bias in (given[2] + shake, given[2] - shake):
            sure &= (dsa.route_to_experts(*given[:2], bias, **options_of(variant))[0] == expected).all(1)
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
    x, weight = torch.randn(64, channels, device="cuda").bfloat16(), torch.randn(256, channels, device="cuda") / 40
    given, options = (weight.bfloat16(), torch.randn(256, device="cuda")), options_of(VARIANTS[0])
    experts, weights, *_ = dsa.route_to_experts(x, *given, **options)
    for first, tokens in ((0, 1), (5, 1), (63, 1), (3, 8), (40, 9), (31, 33), (1, 63)):
        part = slice(first, first + tokens)
        found = dsa.route_to_experts(x[part], *given, **options)
        assert torch.equal(found[0], experts[part]) and torch.equal(found[1], weights[part])


@pytest.mark.parametrize("tokens", [6, 60])
@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
def test_what_is_not_finite_stays_in_its_token(variant, tokens):
    x, weight, bias = integers(tokens, 2048, variant["experts"])
    weight[0, 100], weight[1, 100] = 1, -1
    clean = dsa.route_to_experts(x, weight, bias, **options_of(variant))
    x[1, 100] = torch.inf
    x[2, 7] = torch.nan
    x[3] = 3e38
    x[5] = -3e38
    experts, weights, *by_expert = dsa.route_to_experts(x, weight, bias, **options_of(variant))
    assert_same_bits(by_expert, dsa.sort_by_expert(experts, variant["experts"]))
    others = [t for t in range(tokens) if t not in (1, 2, 3, 5)]
    assert torch.equal(experts[others], clean[0][others]) and torch.equal(weights[others], clean[1][others])
    assert ((experts >= 0) & (experts < variant["experts"])).all() and weights[2].isnan().all()
    assert all(len(set(row)) == len(row) for row in experts.tolist())


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_rows_with_gaps(tokens):
    x, weight, bias = integers(tokens, 2048, 256)
    expected = dsa.route_to_experts(x, weight, bias, **options_of(VARIANTS[2]))
    wide = among_nan(x, 128, 128), among_nan(weight, 128, 128)
    assert_same_bits(dsa.route_to_experts(*wide, bias, **options_of(VARIANTS[2])), expected)


@pytest.mark.parametrize("tokens", [1, 64])
def test_graph_replay_with_new_numbers(tokens):
    """Calls one after the other, as the layers of a model: each waits for the one before, whose memory is reused."""
    given, options = integers(tokens, 7168, 256), options_of(VARIANTS[0])

    def layers(*given):
        return [dsa.route_to_experts(*given, **options) for _ in range(20)]

    for found in replays(layers, given, partial(integers, tokens, 7168, 256), times=5):
        expected = by_themselves(*given, options)
        for each in found:
            assert_same_bits(each, expected)
