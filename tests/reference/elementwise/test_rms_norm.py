"""The RMS norm's reference against float64."""

import pytest
import torch

from dsa.reference import rms_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(8,), (5, 24), (2, 3, 4, 64), (0, 16), (3, 0, 8)])
def test_formula(shape, dtype):
    x, weight = (3 * torch.randn(shape)).to(dtype), torch.randn(shape[-1])
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-2).sqrt()
    tolerance = {"rtol": torch.finfo(dtype).eps, "atol": 1e-6}
    for got, want in ((rms_norm(x, None, 1e-2), expected), (rms_norm(x, weight, 1e-2), expected * weight.double())):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, **tolerance)


def test_rounds_once():
    x, weight = torch.randn(50, 64).bfloat16(), torch.randn(64)
    assert torch.equal(rms_norm(x, weight), rms_norm(x.float(), weight).bfloat16())


def test_gradients():
    x, weight = torch.randn(3, 16, requires_grad=True), torch.randn(16, requires_grad=True)
    gradients = torch.autograd.grad(rms_norm(x, weight, 1e-3).square().sum(), (x, weight))
    a, b = (t.detach().double().requires_grad_() for t in (x, weight))
    y = a / (a.square().mean(-1, keepdim=True) + 1e-3).sqrt() * b
    for got, want in zip(gradients, torch.autograd.grad(y.square().sum(), (a, b)), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([1.0], None), TypeError, "x: must be a torch.Tensor, got list"),
        ((torch.zeros(2, 8, dtype=torch.int32), None), ValueError, "x: dtype must be .*, got int32"),
        ((torch.tensor(1.0), None), ValueError, r"x: must have at least 1 dimension, got shape \[\]"),
        ((torch.zeros(2, 8), torch.zeros(7)), ValueError, r"weight: shape must be \[8\], got \[7\]"),
        ((torch.zeros(2, 8), torch.zeros(8).bfloat16()), ValueError, "weight: dtype must be float32, got bfloat16"),
        ((torch.zeros(2, 8), 1.0), TypeError, "weight: must be a torch.Tensor, got float"),
    ],
)
def test_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        rms_norm(*arguments)
