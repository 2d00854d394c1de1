"""The norm's reference: shapes, rounding, gradients and wrong arguments."""

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.cases.elementwise import rms_normed
from dsa.reference import rms_norm
from tests.reference.common import assert_refused

(CASE,) = cases_of("rms_norm")


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(8,), (5, 24), (2, 3, 4, 64), (0, 16), (3, 0, 8)])
def test_against_float64(shape, dtype, weighted):
    CASE.verify(shape=shape, dtype=dtype, weighted=weighted, eps=1e-2)


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
    assert_refused(message, dsa.rms_norm, *arguments)
