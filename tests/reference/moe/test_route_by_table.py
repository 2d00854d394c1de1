"""The reference of route_by_table: token ids without a row in the table, and table entries that name no expert."""

import torch

from dsa.cases import cases_of
from dsa.reference import route_by_table

(CASE,) = cases_of("route_by_table")


def test_tokens_without_a_row_and_numbers_outside_have_no_expert():
    given = CASE.arguments(tokens=4, channels=64, experts=12, top_k=3, first_expert=1)
    given["table"][2], given["tokens"] = torch.tensor([12, 5, -3]), torch.tensor([1000, -1, 2, 0])
    found = CASE.run(given)
    CASE.check(given, found)
    assert found[0][:3].tolist() == [[-1] * 3, [-1] * 3, [-1, 5, -1]]
    experts, weights, _, _, ends = route_by_table(**given | {"table": given["table"][:0]})
    assert (experts == -1).all() and not weights.any() and not ends.any()
