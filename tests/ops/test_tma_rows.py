"""`tma_rows` copies a tensor only if its rows do not start at multiples of 16 bytes, or its channels are not
contiguous."""

import pytest
import torch

from dsa.runtime.checks import tma_rows

X = torch.randn(6, 4, 128).bfloat16()


def test_not_copied():
    by_head, one_for_all = X.transpose(0, 1), X[:, :1].expand(6, 4, 128)
    assert all(tma_rows(x) is x for x in (X, by_head, one_for_all))


@pytest.mark.parametrize(
    "x",
    [torch.randn(6, 4, 131).bfloat16()[..., :128], X[..., 1:65], X.mT, X[..., :1].expand(6, 4, 128)],
    ids=("rows off", "begins off", "channels apart", "one number for all channels"),
)
def test_copied(x):
    got = tma_rows(x)
    assert torch.equal(got, x) and got.is_contiguous() and got.data_ptr() % 16 == 0
