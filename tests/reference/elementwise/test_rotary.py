"""The rotation's reference against complex numbers in float64."""

import pytest
import torch

from dsa.reference import apply_rotary
from tests.reference.common import assert_refused
from tests.reference.formulas import rotated


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dims", ["first", "last"])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("shape", "channels"), [((5, 8), 8), ((4, 3, 24), 16), ((3, 2, 2, 9), 6), ((0, 2, 8), 4)])
def test_formula(shape, channels, interleaved, dims, dtype):
    x, angles = torch.randn(shape).to(dtype), torch.randn(shape[0], channels // 2)
    expected = rotated(x, angles.cos(), angles.sin(), interleaved, dims)
    got = apply_rotary(x, angles.cos(), angles.sin(), interleaved=interleaved, dims=dims)
    assert got.dtype == dtype and got.is_contiguous()
    torch.testing.assert_close(got.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": [1.0]}, "x: must be a torch.Tensor, got list"),
        ({"x": torch.zeros(8)}, r"x: must have at least 2 dimensions, got shape \[8\]"),
        ({"x": torch.zeros(3, 6)}, "x: the last dimension must be at least 8 for these cos and sin, got 6"),
        ({"x": torch.zeros(3, 8, dtype=torch.int32)}, "x: dtype must be .*, got int32"),
        ({"cos": torch.zeros(2, 4)}, r"cos: shape must be \[3, R / 2\], got \[2, 4\]"),
        ({"sin": torch.zeros(3, 3)}, r"sin: shape must be \[3, 4\], got \[3, 3\]"),
        ({"sin": torch.zeros(3, 4).bfloat16()}, "sin: dtype must be float32, got bfloat16"),
        ({"dims": "middle"}, "dims: must be 'first' or 'last', got 'middle'"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    arguments = {"x": torch.zeros(3, 2, 8), "cos": torch.zeros(3, 4), "sin": torch.zeros(3, 4), "dims": "first"}
    assert_refused(message, apply_rotary, **(arguments | change), interleaved=True)
