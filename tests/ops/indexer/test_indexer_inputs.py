"""The launches of `quantize_indexer_queries` and `write_indexer_keys` on the CPU: the weights, angles and strides that
kernels get."""

import torch

from dsa.cases import cases_of
from dsa.ops.indexer import indexer_inputs as op

CASE = cases_of("indexer_inputs")[0]


def test_weights_are_contiguous_whatever_they_were():
    given = CASE.arguments(tokens=5, heads=3)
    given["weights"] = given["weights"].T.contiguous().T
    CASE.check(given, CASE.results(given))


def test_angles_in_rows_of_16_bytes():
    wide = torch.randn(9, 35)
    aligned, cos = torch.randn(9, 48)[:, :16], torch.randn(9, 16)
    assert op._angle_rows(aligned) is aligned and op._angle_rows(cos) is cos
    # a wrong row stride, a wrong address, and two wrong strides of the last dimension
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
