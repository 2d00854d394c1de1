"""The RMS norm's reference against float64."""

import pytest
import torch

from dsa.reference import rms_norm
from tests.reference.common import assert_refused
from tests.reference.formulas import rms_normed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(8,), (5, 24), (2, 3, 4, 64), (0, 16), (3, 0, 8)])
def test_formula(shape, dtype):
    x, weight = (3 * torch.randn(shape)).to(dtype), torch.randn(shape[-1])
    for gain in (None, weight):
        got = rms_norm(x, gain, 1e-2)
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), rms_normed(x, gain, 1e-2), rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_rounds_once():
    x, weight = torch.randn(50, 64).bfloat16(), torch.randn(64)
    assert torch.equal(rms_norm(x, weight), rms_norm(x.float(), weight).bfloat16())


def test_gradients():
    x, weight = torch.randn(3, 16, requires_grad=True), torch.randn(16, requires_grad=True)
    got, expected = (
        torch.autograd.grad(norm(x, weight, 1e-3).square().sum(), (x, weight)) for norm in (rms_norm, rms_normed)
    )
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0], None), "x: must be a torch.Tensor, got list"),
        ((torch.zeros(2, 8, dtype=torch.int32), None), "x: dtype must be .*, got int32"),
        ((torch.tensor(1.0), None), r"x: must have at least 1 dimension, got shape \[\]"),
        ((torch.zeros(2, 8), torch.zeros(7)), r"weight: shape must be \[8\], got \[7\]"),
        ((torch.zeros(2, 8), torch.zeros(8).bfloat16()), "weight: dtype must be float32, got bfloat16"),
        ((torch.zeros(2, 8), 1.0), "weight: must be a torch.Tensor, got float"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    assert_refused(message, rms_norm, *arguments)
