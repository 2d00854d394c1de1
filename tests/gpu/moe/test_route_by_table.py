"""Router and sort by a table of experts on the GPU: of logits that rounding does not touch the weights are the gate's,
bit for bit, the sort's results exact in any case."""

import math
from functools import partial

import pytest
import torch

import dsa
from dsa.testing import poison_free_memory
from tests.gpu.op_checks import assert_same_bits, replays

TOKENS = [1, 2, 7, 8, 9, 31, 32, 33, 50, 63, 64]
SIZES = [(256, 6), (384, 6), (40, 3), (512, 32), (6, 1)]  # experts, of a token
VOCABULARY = 1000


def integers(tokens, channels, experts, top_k, dtype=torch.bfloat16):
    """Operands whose products and sums, whatever their order, are exact in fp32, with logits of about 1."""
    x = torch.randint(-2, 3, (tokens, channels), device="cuda").to(dtype)
    weight = torch.randint(-1, 2, (experts, channels), device="cuda") * 2.0 ** -round(math.log2(channels) / 2)
    table = torch.rand(VOCABULARY, experts, device="cuda").argsort(1)[:, :top_k].contiguous()
    return x, weight.to(dtype), table, torch.randint(VOCABULARY, (tokens,), device="cuda")


def by_themselves(x, weight, table, tokens, scale=1.5, first=0, count=None):
    """The formula in float64, and the sort."""
    experts = table[tokens]
    s = torch.nn.functional.softplus((x.double() @ weight.double().T).gather(1, experts)).sqrt()
    own = len(weight) - first if count is None else count
    weights = scale * s / (s.sum(1, keepdim=True) + 1e-20)
    return experts, weights, *dsa.sort_by_expert(experts - first, own)


def check(found, expected):
    assert torch.equal(found[0], expected[0]) and all(map(torch.equal, found[2:], expected[2:]))
    torch.testing.assert_close(found[1].double(), expected[1], rtol=1e-5, atol=1e-7)
    return (found[1].double() - expected[1]).abs().max().item() if found[1].numel() else 0.0


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("experts, top_k", SIZES)
def test_beside_the_parts(experts, top_k, tokens, record_error):
    given = integers(tokens, 4096, experts, top_k)
    poison_free_memory(mebibytes=16)
    record_error(check(dsa.route_by_table(*given, scale=1.5), by_themselves(*given)))


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("experts, top_k", [(256, 6), (384, 6)])
def test_bits_of_the_gate_for_the_same_experts(experts, top_k, tokens):
    """A table of what route_to_experts chooses, of any numbers."""
    x, weight = torch.randn(tokens, 4096, device="cuda"), torch.randn(experts, 4096, device="cuda") / 40
    given, bias = (x.bfloat16(), weight.bfloat16()), torch.randn(experts, device="cuda")
    expected = dsa.route_to_experts(*given, bias, top_k, scores="sqrtsoftplus", scale=1.5)
    found = dsa.route_by_table(*given, expected[0], torch.arange(tokens, device="cuda"), scale=1.5)
    assert_same_bits(found, expected)


@pytest.mark.parametrize("first, count", [(0, 32), (96, 64), (224, 32), (255, 1), (7, 249)])
@pytest.mark.parametrize("tokens", [1, 8, 9, 64])
def test_a_process_with_some_of_the_experts(tokens, first, count):
    given = integers(tokens, 2048, 256, 6)
    poison_free_memory(mebibytes=16)
    found = dsa.route_by_table(*given, scale=1.5, first_expert=first, count=count)
    check(found, by_themselves(*given, first=first, count=count))


@pytest.mark.parametrize("tokens", [6, 40])
def test_what_is_no_expert(tokens):
    """In some tokens, whose others stay right; as the reference has it."""
    x, weight, table, ids = integers(tokens, 2048, 256, 6)
    ids[0], ids[2], ids[3] = -1, VOCABULARY, 2**40
    table[ids[4], 1], table[ids[4], 4], table[ids[5], 0] = 256, -1, 2**33 + 7
    for first, count in ((0, None), (100, 50)):
        options = {"scale": 1.5, "first_expert": first, "count": count}
        found = dsa.route_by_table(x, weight, table, ids, **options)
        with dsa.use_backend("reference"):
            expected = dsa.route_by_table(x, weight, table, ids, **options)
        check(found, (expected[0], expected[1].double(), *expected[2:]))
        assert (found[0][[0, 2, 3]] == -1).all() and not found[1][[0, 2, 3]].any() and found[1].isfinite().all()


@pytest.mark.parametrize("tokens", [6, 60])
def test_what_is_not_finite_stays_in_its_token(tokens):
    x, weight, *rest = integers(tokens, 2048, 256, 6)
    clean = dsa.route_by_table(x, weight, *rest)
    x[1, 100], x[2, 7] = torch.inf, torch.nan
    found = dsa.route_by_table(x, weight, *rest)
    others = [t for t in range(tokens) if t not in (1, 2)]
    assert torch.equal(found[1][others], clean[1][others]) and found[1][2].isnan().all()
    assert torch.equal(found[0], clean[0]) and all(map(torch.equal, found[2:], clean[2:]))


@pytest.mark.parametrize("tokens", [1, 64])
def test_graph_replay_with_new_numbers(tokens):
    """Calls one after the other, as the layers of a model: each waits for the one before, whose memory is reused."""
    given = integers(tokens, 4096, 256, 6)

    def layers(*given):
        return [dsa.route_by_table(*given, scale=1.5) for _ in range(20)]

    for found in replays(layers, given, partial(integers, tokens, 4096, 256, 6), times=5):
        expected = by_themselves(*given)
        for each in found:
            check(each, expected)
