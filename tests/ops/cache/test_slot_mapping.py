"""`slot_mapping` in graphs compiled for any number of tokens."""

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.cases.case import same_bits

CASE, RING, ALL = cases_of("slot_mapping")


@pytest.mark.parametrize("dynamic", [None, True])
def test_nodes_of_a_compiled_graph(dynamic):
    def slots(x):
        return [dsa.slot_mapping(**given | {"num_tokens": x.shape[0]}) for given in calls]

    calls = [case.arguments() for case in (CASE, RING, ALL)]
    compiled = torch.compile(slots, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens in (7, 9):
        for got, expected in zip(compiled(torch.zeros(tokens, 3)), slots(torch.zeros(tokens, 3)), strict=True):
            assert same_bits(got, expected)
