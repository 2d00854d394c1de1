"""The reference of linear_fp32 (16-bit products with fp32 results): its gradients."""

import torch

from dsa.cases import cases_of
from dsa.reference import linear_fp32


def test_gradients_are_scaled_like_the_rows():
    given = cases_of("linear_fp32")[0].arguments(tokens=4, rows=12)
    x, weight = (given[name].requires_grad_() for name in ("x", "weight"))
    linear_fp32(x, weight, 0.5, scaled_from=8).sum().backward()
    scales = torch.tensor([1.0] * 8 + [0.5] * 4)
    torch.testing.assert_close(x.grad.float(), (scales @ weight.detach().float()).expand(4, -1), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(weight.grad.float(), scales[:, None] * x.detach().float().sum(0), rtol=1e-2, atol=1e-2)
