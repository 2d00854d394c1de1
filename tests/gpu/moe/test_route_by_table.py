"""route_by_table (router, experts from a table by token id, sort) on the GPU: sizes of tables, token ids without a row
in the table, and non-finite numbers."""

import pytest
import torch

import dsa
from dsa.cases import cases_of
from tests.gpu.attention import checked
from tests.gpu.case_checks import by_sizes, grid, spoiled_rows, verify
from tests.gpu.op_checks import assert_same_bits

(CASE,) = cases_of("route_by_table")
TOKENS = [1, 2, 7, 8, 9, 31, 32, 33, 50, 63, 64]
TABLES = [(256, 6), (384, 6), (40, 3), (512, 32), (6, 1)]


@by_sizes(
    *(grid(tokens=TOKENS, experts=[experts], top_k=[top_k]) for experts, top_k in TABLES),
    *(
        grid(tokens=(1, 8, 9, 64), channels=[2048], first_expert=[first], count=[count])
        for first, count in [(0, 32), (96, 64), (224, 32), (255, 1), (7, 249)]
    ),
)
def test_every_table_is_right(sizes, record_error):
    verify(CASE, sizes, record_error)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("experts, top_k", TABLES[:2])
def test_the_same_experts_have_the_bits_of_the_gate(experts, top_k, tokens):
    x, weight = torch.randn(tokens, 4096, device="cuda"), torch.randn(experts, 4096, device="cuda") / 40
    given, bias = (x.bfloat16(), weight.bfloat16()), torch.randn(experts, device="cuda")
    expected = dsa.route_to_experts(*given, bias, top_k, scores="sqrtsoftplus", scale=1.5)
    found = dsa.route_by_table(*given, expected[0], torch.arange(tokens, device="cuda"), scale=1.5)
    assert_same_bits(found, expected)


@pytest.mark.parametrize("first, count", [(0, 256), (100, 50)])
@pytest.mark.parametrize("tokens", [6, 40])
def test_numbers_of_no_row_and_of_no_expert_count_nothing(tokens, first, count):
    given = CASE.arguments("cuda", tokens=tokens, channels=2048, first_expert=first, count=count)
    ids, table = given["tokens"], given["table"]
    ids[0], ids[2], ids[3] = -1, 1000, 2**40
    table[ids[4], 1], table[ids[4], 4], table[ids[5], 0] = 256, -1, 2**33 + 7
    experts, weights, *_ = checked(CASE, given)
    assert (experts[[0, 2, 3]] == -1).all() and not weights[[0, 2, 3]].any() and weights.isfinite().all()


@pytest.mark.parametrize("tokens", [6, 60])
def test_what_is_not_finite_stays_in_its_token(tokens):
    given = CASE.arguments("cuda", tokens=tokens, channels=2048)
    experts, _, *order = CASE.run(given)
    changes = {("x", 1, 100): torch.inf, ("x", 2, 7): torch.nan}
    (weights,) = spoiled_rows(lambda given: CASE.run(given)[1:2], given, changes)
    assert weights[2].isnan().all()
    found, _, *found_order = CASE.run(given)
    assert_same_bits((found, *found_order), (experts, *order))
