"""`window_indices` and `window_slots` in graphs compiled for any number of queries."""

import pytest
import torch

import dsa


def i32(values):
    return torch.tensor(values, dtype=torch.int32)


CU_Q, CU_K = i32([0, 3, 3, 7]), i32([0, 5, 9, 20])
TABLE, LENGTHS = i32([[4, 2, 0], [1, 3, 5]]), i32([20, 3])


def layout(x):
    return x.shape, x.stride(), x.dtype


@pytest.mark.parametrize("dynamic", [None, True])
def test_nodes_of_a_compiled_graph(dynamic):
    def lists(cu_q, cu_k, q, table, lengths):
        slots = dsa.window_slots(table, lengths, q.shape[1], 8, 4)
        return dsa.window_indices(cu_q, cu_k, q.shape[0], 4), slots, dsa.window_slots(None, lengths, 2, 8, 4)

    compiled = torch.compile(lists, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for queries in (7, 9):
        arguments = (CU_Q, CU_K, torch.zeros(queries, 3), TABLE, LENGTHS)
        for got, expected in zip(compiled(*arguments), lists(*arguments), strict=True):
            assert layout(got) == layout(expected) and torch.equal(got, expected)
