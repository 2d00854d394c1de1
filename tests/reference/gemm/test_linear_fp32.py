"""Products of 16-bit numbers in fp32: strides, gradients and wrong arguments."""

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.reference import linear_fp32
from tests.reference.common import assert_refused

(CASE,) = cases_of("linear_fp32")


def inputs(tokens=5):
    given = CASE.arguments(tokens=tokens, rows=12)
    return given["x"], given["weight"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("scale, scaled_from", [(1.0, 0), (0.3, 0), (-2, 7), (0.3, 12)])
def test_against_float64(scale, scaled_from, tokens, dtype):
    CASE.verify(tokens=tokens, channels=64, rows=12, dtype=dtype, scale=scale, scaled_from=scaled_from)


def test_bits_do_not_depend_on_strides():
    x, weight = inputs(4)
    assert torch.equal(linear_fp32(x.T.contiguous().T, weight.T.contiguous().T), linear_fp32(x, weight))


def test_gradients():
    x, weight = inputs(4)
    x.requires_grad_(), weight.requires_grad_()
    linear_fp32(x, weight, 0.5, scaled_from=8).sum().backward()
    scales = torch.tensor([1.0] * 8 + [0.5] * 4)
    torch.testing.assert_close(x.grad.float(), (scales @ weight.detach().float()).expand(4, -1), rtol=1e-2, atol=1e-2)
    expected = scales[:, None] * x.detach().float().sum(0)
    torch.testing.assert_close(weight.grad.float(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": [1.0]}, "x: must be a torch.Tensor, got list"),
        ({"x": torch.zeros(5, 64)}, "x: dtype must be bfloat16 or float16, got float32"),
        ({"x": torch.zeros(64).bfloat16()}, r"x: shape must be \[T, I\], got \[64\]"),
        ({"weight": torch.zeros(12, 64).half()}, "weight: dtype must be x's bfloat16, got float16"),
        ({"weight": torch.zeros(12, 32).bfloat16()}, r"weight: shape must be \[O, 64\], got \[12, 32\]"),
        ({"scale": "1"}, "scale: must be a number, got str"),
        ({"scale": float("nan")}, "scale: must be finite in fp32, got nan"),
        ({"scaled_from": -1}, "scaled_from: must be at least 0, got -1"),
        ({"scaled_from": 13}, "scaled_from: must be at most O = 12, got 13"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    x, weight = inputs()
    assert_refused(message, dsa.linear_fp32, **{"x": x, "weight": weight} | change)
