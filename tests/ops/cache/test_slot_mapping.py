"""The bridge of slots in compiled graphs of any number of tokens."""

import pytest
import torch

import dsa


def i32(values):
    return torch.tensor(values, dtype=torch.int32)


TABLE, BOUNDS, LENGTHS = i32([[4, 2, 0], [1, 3, 5]]), i32([0, 3, 7]), i32([20, 9])


def layout(x):
    return x.shape, x.stride(), x.dtype


@pytest.mark.parametrize("dynamic", [None, True])
def test_nodes_of_a_compiled_graph(dynamic):
    def slots(table, bounds, lengths, x):
        new = dsa.slot_mapping(table, bounds, lengths, x.shape[0], 8, ratio=2)
        return new, dsa.slot_mapping(table, bounds, None, x.shape[0], 8, ring=True)

    compiled = torch.compile(slots, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens in (7, 9):
        arguments = (TABLE, BOUNDS, LENGTHS, torch.zeros(tokens, 3))
        for got, expected in zip(compiled(*arguments), slots(*arguments), strict=True):
            assert layout(got) == layout(expected) and torch.equal(got, expected)
