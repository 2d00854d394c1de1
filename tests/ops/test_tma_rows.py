"""Tensors as TMA reads them: rows that need no copy are not copied."""

import torch

from dsa.ops._tma_rows import tma_rows


def test_rows_as_tma_reads_them():
    x = torch.randn(6, 4, 128).bfloat16()
    assert tma_rows(x) is x
    by_head = x.transpose(0, 1)
    assert tma_rows(by_head).data_ptr() == x.data_ptr()
    odd = torch.randn(6, 4, 131).bfloat16()[..., :128]
    for other in (odd, x[:, :1].expand(6, 4, 128), x[..., 1:65], x.mT):
        got = tma_rows(other)
        assert torch.equal(got, other) and got.is_contiguous() and got.data_ptr() % 16 == 0
