"""Tensors as TMA reads them: rows off multiples of 16 bytes or in several places are copied, others are not."""

import pytest
import torch

from dsa.ops._tma_rows import tma_rows

X = torch.randn(6, 4, 128).bfloat16()


def test_not_copied():
    by_head = X.transpose(0, 1)
    assert tma_rows(X) is X and tma_rows(by_head) is by_head


@pytest.mark.parametrize(
    "x",
    [torch.randn(6, 4, 131).bfloat16()[..., :128], X[:, :1].expand(6, 4, 128), X[..., 1:65], X.mT],
    ids=("rows off", "one row for all heads", "begins off", "channels apart"),
)
def test_copied(x):
    got = tma_rows(x)
    assert torch.equal(got, x) and got.is_contiguous() and got.data_ptr() % 16 == 0
