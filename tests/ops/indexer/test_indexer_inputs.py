"""The bridge of the indexer's inputs, on the CPU: dispatch, torch.compile, and errors that name the argument."""

import torch

import dsa
from dsa.ops.indexer import indexer_inputs as op


def query_arguments(tokens=5, heads=3, rotated=64):
    angles = torch.randn(tokens, rotated // 2)
    return torch.randn(tokens, heads, 128).bfloat16(), torch.randn(tokens, heads), angles.cos(), angles.sin()


def key_arguments(tokens=5, pages=3, page_size=4, rotated=64):
    """All arguments, the cache being the last but one, of NaN."""
    angles = torch.randn(tokens, rotated // 2)
    cache = torch.full((pages, page_size, 1, 132), 0xFF, dtype=torch.uint8)
    slots = torch.randperm(pages * page_size)[:tokens]
    slots[:1] = -1
    k = torch.randn(tokens, 128).bfloat16()
    return k, torch.rand(128), torch.randn(128), angles.cos(), angles.sin(), cache, slots


def layout(x):
    return x.shape, x.stride(), x.dtype


def test_weights_are_contiguous_whatever_they_were():
    q, weights, cos, sin = query_arguments()
    assert dsa.quantize_indexer_queries(q, weights.T.contiguous().T, cos, sin)[1].is_contiguous()


def test_what_the_query_kernel_gets(launches):
    q, weights, cos, sin = query_arguments(heads=1, rotated=32)
    column = torch.randn(5, 7)[:, 3:4]
    q8, w8 = dsa.quantize_indexer_queries(q, column, cos, sin, interleaved=True, use_ue8m0=False)
    [(variant, arguments)] = launches
    assert variant == (torch.bfloat16, 32, True, False, False)
    assert torch.equal(arguments[1], column) and arguments[1].stride() == (7, 1)
    assert [x.data_ptr() for x in arguments] == [x.data_ptr() for x in (q, column, cos, sin, q8, w8)]
    assert q8.shape == q.shape and w8.shape == weights.shape
    dsa.quantize_indexer_queries(*query_arguments(tokens=0))
    dsa.quantize_indexer_queries(*query_arguments(heads=0))
    assert len(launches) == 1


def test_what_the_key_kernel_gets(launches):
    k, weight, bias, cos, sin, cache, slots = key_arguments(rotated=128)
    dsa.write_indexer_keys(k, weight, bias, cos, sin, cache, slots.int(), eps=0.25, dims="last")
    [(variant, arguments)] = launches
    assert variant == (torch.bfloat16, torch.int32, 128, False, True, True)
    assert [x.data_ptr() for x in arguments[:6]] == [x.data_ptr() for x in (k, weight, bias, cos, sin, cache)]
    assert layout(arguments[5]) == ((3, 528), (528, 1), torch.uint8) and torch.equal(arguments[6], slots.int())
    assert arguments[7:] == (4, 0.25)
    dsa.write_indexer_keys(*key_arguments(tokens=0))
    dsa.write_indexer_keys(k[:0], weight, bias, cos[:0], sin[:0], cache[:0], slots[:0])
    assert len(launches) == 1


def test_angles_in_rows_of_16_bytes():
    wide = torch.randn(9, 35)
    aligned, cos = torch.randn(9, 48)[:, :16], torch.randn(9, 16)
    assert op._angle_rows(aligned) is aligned and op._angle_rows(cos) is cos
    # rows, address, last dimension
    for bad in (wide[:, :32], torch.randn(9, 36)[:, 1:33], torch.randn(9, 64)[:, ::2], torch.randn(32, 9).T):
        got = op._angle_rows(bad)
        assert torch.equal(got, bad) and got.is_contiguous() and got.data_ptr() % 16 == 0


def test_strides_of_single_rows():
    q = torch.randn(4, 3, 128)
    assert op._without_odd_strides(q) is q
    one = q.as_strided((1, 3, 128), (5, 128, 1), 128)
    got = op._without_odd_strides(one)
    assert got.stride() == (128, 128, 1) and torch.equal(got, one) and got.data_ptr() == one.data_ptr()
    assert op._without_odd_strides(q[:, 1:2].as_strided((4, 1, 128), (384, 7, 1))).stride() == (384, 128, 1)
    assert op._without_odd_strides(q[0, :1].as_strided((1, 128), (3, 1))).stride() == (128, 1)
