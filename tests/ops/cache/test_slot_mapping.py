"""The bridge of slots, on the CPU: dispatch, what it launches, torch.compile, and errors with a name."""

import pytest
import torch
from torch import library

import dsa
from dsa.ops.cache import slot_mapping as op  # noqa: F401, for the fixture `launches`
from dsa.reference.cache import slot_mapping as reference

OP = torch.ops.dsa.slot_mapping


def i32(values):
    return torch.tensor(values, dtype=torch.int32)


TABLE, BOUNDS, LENGTHS = i32([[4, 2, 0], [1, 3, 5]]), i32([0, 3, 7]), i32([20, 9])


def layout(x):
    return x.shape, x.stride(), x.dtype


def test_runs_the_reference_without_a_gpu():
    for lengths in (LENGTHS, None):
        for options in ({}, {"ratio": 4}, {"ring": True}):
            got = dsa.slot_mapping(TABLE, BOUNDS, lengths, 8, 8, **options)
            assert torch.equal(got, reference.slot_mapping(TABLE, BOUNDS, lengths, 8, 8, **options))
            assert layout(got) == ((8,), (1,), torch.int64)


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


def test_registration():
    library.opcheck(OP.default, (TABLE, BOUNDS, LENGTHS, 7, 8, 2, False))
    library.opcheck(OP.default, (TABLE, BOUNDS, None, 7, 8, 1, True))


@pytest.mark.parametrize("tokens", [0, 7])
def test_fake_results_are_laid_out_as_the_real_ones(tokens):
    fake = OP(TABLE.to("meta"), BOUNDS.to("meta"), LENGTHS.to("meta"), tokens, 8, 1, False)
    assert fake.is_meta and layout(fake) == layout(dsa.slot_mapping(TABLE, BOUNDS, LENGTHS, tokens, 8))


def test_fake_calls_check_their_arguments():
    with pytest.raises(ValueError, match="page_size: must be at least 1, got 0"):
        OP(TABLE.to("meta"), BOUNDS.to("meta"), None, 7, 0, 1, False)


def test_forcing_the_kernel_on_the_cpu_is_an_error():
    with dsa.use_backend("cute"), pytest.raises(ValueError, match="slot_mapping: backend 'cute' was asked for, but"):
        dsa.slot_mapping(TABLE, BOUNDS, LENGTHS, 7, 8)


def test_what_is_no_tensor_is_named():
    for position, name in enumerate(("block_table", "cu_seqlens", "cache_seqlens")):
        tensors = [TABLE, BOUNDS, LENGTHS]
        tensors[position] = [0, 3]
        with pytest.raises(TypeError, match=rf"{name}: must be a torch.Tensor, got list"):
            dsa.slot_mapping(*tensors, 7, 8)


def test_what_the_kernels_get(launches):
    table, bounds, lengths = TABLE.T.contiguous().T, BOUNDS.repeat_interleave(2)[::2], LENGTHS.repeat_interleave(3)[::3]
    new = dsa.slot_mapping(table, bounds, lengths, 7, 8, ratio=4)
    every = dsa.slot_mapping(table, bounds, None, 7, 8)
    ring = dsa.slot_mapping(table, bounds, lengths, 7, 8, ring=True)
    assert [variant for variant, _ in launches] == [(True, False), (False, False), (True, True)]
    expected = (new, lengths, 4), (every, None, 1), (ring, lengths, 1)
    for (_, got), (slots, own, ratio) in zip(launches, expected, strict=True):
        # Of any strides, and where they are.
        assert got[0] is table and got[1] is bounds and got[2] is own and got[3] is slots and got[4:] == (8, ratio)
        assert layout(slots) == ((7,), (1,), torch.int64)


def test_nothing_to_do_is_not_launched(launches):
    assert dsa.slot_mapping(TABLE, BOUNDS, LENGTHS, 0, 8).shape == (0,)
    assert dsa.slot_mapping(TABLE[:, :0], BOUNDS, LENGTHS, 7, 8).eq(-1).all()
    assert dsa.slot_mapping(TABLE[:0], BOUNDS[:1], LENGTHS[:0], 7, 8).eq(-1).all()
    assert not launches


def test_what_the_kernels_do_not_take(launches):
    most = 2**30
    meta = LENGTHS.to("meta")
    for arguments, ratio, message in [
        ((TABLE, BOUNDS, meta, 7, 8), 1, "cache_seqlens: must be on block_table's device cpu, got meta"),
        ((TABLE, BOUNDS, LENGTHS, most + 1, 8), 1, "num_tokens: the kernel takes at most 1073741824, got 1073741825"),
        ((TABLE, BOUNDS, LENGTHS, 7, most + 1), 1, "page_size: the kernel takes at most 1073741824, got"),
        ((TABLE, BOUNDS, LENGTHS, 7, 8), most + 1, "ratio: the kernel takes at most 1073741824, got"),
    ]:
        with pytest.raises(ValueError, match=message):
            dsa.slot_mapping(*arguments, ratio=ratio)
    assert not launches
