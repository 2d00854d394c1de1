"""The rotation's reference: shapes, kinds of pairs, dtypes and wrong arguments."""

import pytest
import torch

import dsa
from dsa.cases import cases_of
from tests.reference.common import assert_refused

CASES = cases_of("rotary")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dims", ["first", "last"])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("shape", "rotated"), [((5, 8), 8), ((4, 3, 24), 16), ((3, 2, 2, 9), 6), ((0, 2, 8), 4)])
def test_against_float64(shape, rotated, interleaved, dims, dtype):
    for case in CASES:
        case.verify(shape=shape, rotated=rotated, interleaved=interleaved, dims=dims, dtype=dtype)


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
    assert_refused(message, dsa.apply_rotary, **CASES[0].arguments(shape=(3, 2, 8), rotated=8) | change)
