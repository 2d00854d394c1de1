"""The bridge of the window's lists, on the CPU: dispatch, what it launches, torch.compile, and errors with a name."""

import pytest
import torch

import dsa
from dsa.ops.mla import window_indices as op  # noqa: F401, for the fixture `launches`
from dsa.reference.mla import window_indices as reference

INDICES, SLOTS = torch.ops.dsa.window_indices, torch.ops.dsa.window_slots


def i32(values):
    return torch.tensor(values, dtype=torch.int32)


CU_Q, CU_K = i32([0, 3, 3, 7]), i32([0, 5, 9, 20])
TABLE, LENGTHS = i32([[4, 2, 0], [1, 3, 5]]), i32([20, 3])


def layout(x):
    return x.shape, x.stride(), x.dtype


def test_runs_the_reference_without_a_gpu():
    got = dsa.window_indices(CU_Q, CU_K, 8, 4)
    assert torch.equal(got, reference.window_indices(CU_Q, CU_K, 8, 4)) and layout(got) == ((8, 4), (4, 1), torch.int32)
    for table in (TABLE, None):
        got = dsa.window_slots(table, LENGTHS, 2, 8, 5)
        assert torch.equal(got, reference.window_slots(table, LENGTHS, 2, 8, 5))
        assert layout(got) == ((2, 2, 5), (10, 5, 1), torch.int32)


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


def test_registration():
    torch.library.opcheck(INDICES.default, (CU_Q, CU_K, 7, 4))
    torch.library.opcheck(SLOTS.default, (TABLE, LENGTHS, 2, 8, 4))
    torch.library.opcheck(SLOTS.default, (None, LENGTHS, 2, 8, 4))


@pytest.mark.parametrize(("queries", "s_q"), [(0, 0), (5, 1)])
def test_fake_results_are_laid_out_as_the_real_ones(queries, s_q):
    fake = INDICES(CU_Q.to("meta"), CU_K.to("meta"), queries, 3)
    assert fake.is_meta and layout(fake) == layout(dsa.window_indices(CU_Q, CU_K, queries, 3))
    fake = SLOTS(TABLE.to("meta"), LENGTHS.to("meta"), s_q, 8, 3)
    assert fake.is_meta and layout(fake) == layout(dsa.window_slots(TABLE, LENGTHS, s_q, 8, 3))


def test_fake_calls_check_their_arguments():
    with pytest.raises(ValueError, match="window: must be at least 1, got 0"):
        INDICES(CU_Q.to("meta"), CU_K.to("meta"), 7, 0)
    with pytest.raises(ValueError, match="page_size: a ring must hold"):
        SLOTS(None, LENGTHS.to("meta"), 2, 4, 4)


def test_forcing_the_kernel_on_the_cpu_is_an_error():
    with dsa.use_backend("cute"):
        with pytest.raises(ValueError, match="window_indices: backend 'cute' was asked for, but"):
            dsa.window_indices(CU_Q, CU_K, 7, 4)
        with pytest.raises(ValueError, match="window_slots: backend 'cute' was asked for, but"):
            dsa.window_slots(TABLE, LENGTHS, 2, 8, 4)


def test_what_is_no_tensor_is_named():
    for position, name in enumerate(("cu_seqlens_q", "cu_seqlens_k")):
        tensors = [CU_Q, CU_K]
        tensors[position] = [0, 3]
        with pytest.raises(TypeError, match=rf"{name}: must be a torch.Tensor, got list"):
            dsa.window_indices(*tensors, 7, 4)
    with pytest.raises(TypeError, match=r"cache_seqlens: must be a torch\.Tensor, got list"):
        dsa.window_slots(None, [3], 1, 8, 4)
    with pytest.raises(TypeError, match=r"block_table: must be a torch\.Tensor, got list"):
        dsa.window_slots([[1]], i32([3]), 1, 8, 4)


def test_what_the_kernels_get(launches):
    cu_q, table, lengths = CU_Q.repeat_interleave(2)[::2], TABLE.T.contiguous().T, LENGTHS.repeat_interleave(3)[::3]
    indices = dsa.window_indices(cu_q, CU_K, 7, 4)
    pages = dsa.window_slots(table, lengths, 2, 8, 4)
    ring = dsa.window_slots(None, LENGTHS, 2, 8, 4)
    (first, listed), (second, paged), (third, ringed) = launches
    assert (first, second, third) == ((), (False,), (True,))
    # Of any strides, and where they are.
    assert listed[0] is cu_q and listed[1] is CU_K and listed[2] is indices
    assert paged[0] is table and paged[1] is lengths and paged[2] is pages and paged[3] == 8
    assert ringed[0] is None and ringed[1] is LENGTHS and ringed[2] is ring and ringed[3] == 8
    assert [layout(x) for x in (indices, pages, ring)] == [
        ((7, 4), (4, 1), torch.int32),
        *([((2, 2, 4), (8, 4, 1), torch.int32)] * 2),
    ]


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
