"""Router and sort by a table of experts, beside what its case leaves out."""

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.testing import poison_free_memory
from tests.gpu.op_checks import assert_same_bits

(CASE,) = cases_of("route_by_table")
TOKENS = [1, 2, 7, 8, 9, 31, 32, 33, 50, 63, 64]


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("experts, top_k", [(256, 6), (384, 6), (40, 3), (512, 32), (6, 1)])
def test_tables(experts, top_k, tokens, record_error):
    poison_free_memory(mebibytes=16)
    record_error(CASE.verify("cuda", tokens=tokens, experts=experts, top_k=top_k))


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
    CASE.verify("cuda", tokens=tokens, channels=2048, first_expert=first, count=count)


@pytest.mark.parametrize("tokens", [6, 40])
def test_what_is_no_expert(tokens):
    """In some tokens, whose others stay right."""
    given = CASE.arguments("cuda", tokens=tokens, channels=2048)
    ids, table = given["tokens"], given["table"]
    ids[0], ids[2], ids[3] = -1, 1000, 2**40
    table[ids[4], 1], table[ids[4], 4], table[ids[5], 0] = 256, -1, 2**33 + 7
    for first, count in ((0, 256), (100, 50)):
        own = given | {"first_expert": first, "count": count}
        found = CASE.run(own)
        CASE.check(own, found)
        assert (found[0][[0, 2, 3]] == -1).all() and not found[1][[0, 2, 3]].any() and found[1].isfinite().all()


@pytest.mark.parametrize("tokens", [6, 60])
def test_what_is_not_finite_stays_in_its_token(tokens):
    given = CASE.arguments("cuda", tokens=tokens, channels=2048)
    clean = CASE.run(given)
    given["x"][1, 100], given["x"][2, 7] = torch.inf, torch.nan
    found = CASE.run(given)
    others = [t for t in range(tokens) if t not in (1, 2)]
    assert torch.equal(found[1][others], clean[1][others]) and found[1][2].isnan().all()
    assert torch.equal(found[0], clean[0]) and all(map(torch.equal, found[2:], clean[2:]))
