"""The reference of 16-bit products in fp32: strides and gradients."""

import torch

from dsa.cases import cases_of
from dsa.reference import linear_fp32

GIVEN = cases_of("linear_fp32")[0].arguments(tokens=4, rows=12)
X, WEIGHT = GIVEN["x"], GIVEN["weight"]


def test_bits_do_not_depend_on_strides():
    assert torch.equal(linear_fp32(X.T.contiguous().T, WEIGHT.T.contiguous().T), linear_fp32(X, WEIGHT))


def test_gradients_are_scaled_like_the_rows():
    x, weight = X.clone().requires_grad_(), WEIGHT.clone().requires_grad_()
    linear_fp32(x, weight, 0.5, scaled_from=8).sum().backward()
    scales = torch.tensor([1.0] * 8 + [0.5] * 4)
    torch.testing.assert_close(x.grad.float(), (scales @ WEIGHT.float()).expand(4, -1), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(weight.grad.float(), scales[:, None] * X.float().sum(0), rtol=1e-2, atol=1e-2)
