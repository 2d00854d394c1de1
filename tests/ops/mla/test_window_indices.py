"""The bridge of the window's lists, on the CPU: dispatch, what it launches, torch.compile, and errors with a name."""

import pytest
import torch

import dsa
from dsa.ops.mla import window_indices as op  # noqa: F401, for the fixture `launches`


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


def test_nothing_to_do_is_not_launched(launches):
    assert dsa.window_indices(CU_Q, CU_K, 0, 4).shape == (0, 4)
    assert dsa.window_slots(TABLE[:0], LENGTHS[:0], 2, 8, 4).shape == (0, 2, 4)
    assert dsa.window_slots(TABLE, LENGTHS, 0, 8, 4).shape == (2, 0, 4)
    assert dsa.window_slots(TABLE[:, :0], LENGTHS, 2, 8, 4).eq(-1).all()
    assert not launches


def test_what_the_kernels_do_not_take(launches):
    meta = torch.zeros(4, dtype=torch.int32, device="meta")
    most = 2**30
    for call, arguments, message in [
        (dsa.window_indices, (CU_Q, meta, 7, 4), "cu_seqlens_k: must be on cu_seqlens_q's device cpu, got meta"),
        (dsa.window_indices, (CU_Q, CU_K, most + 1, 1), "total_q: the kernel takes at most 1073741824, got"),
        (dsa.window_indices, (CU_Q, CU_K, 1, most + 1), "window: the kernel takes at most 1073741824, got"),
        (dsa.window_slots, (TABLE.to("meta"), LENGTHS, 1, 8, 4), "block_table: must be on cache_seqlens's device cpu"),
        (dsa.window_slots, (TABLE, LENGTHS, 1, most + 1, 4), "page_size: the kernel takes at most"),
        (dsa.window_slots, (TABLE, LENGTHS, 1, 8, most + 1), "window: the kernel takes at most"),
        (
            dsa.window_slots,
            (TABLE, LENGTHS, most, 8, 1),
            r"B \* s_q: the kernel takes at most .*, got 2147483648",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            call(*arguments)
    assert not launches
