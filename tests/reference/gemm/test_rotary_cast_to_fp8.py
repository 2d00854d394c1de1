"""Heads rotated and cast to FP8, on the CPU."""

import pytest
import torch

from dsa.reference import apply_rotary, per_token_cast_to_fp8, rotary_cast_to_fp8
from tests.reference.common import assert_refused, assert_same_bits


def operands(tokens=5, heads=6, dim=256, rotated=64):
    angles = torch.randn(tokens, rotated // 2)
    return torch.randn(tokens, heads, dim).bfloat16(), angles.cos(), angles.sin()


@pytest.mark.parametrize("tokens", [0, 5])
@pytest.mark.parametrize("use_ue8m0", [True, False])
@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_a_groups_tokens_lie_together(groups, use_ue8m0, tokens):
    x, cos, sin = operands(tokens)
    turned = apply_rotary(x, cos, sin, interleaved=True, dims="last")
    rows = turned.view(tokens, groups, 1536 // groups).transpose(0, 1).reshape(-1, 1536 // groups)
    got, expected = rotary_cast_to_fp8(x, cos, sin, groups, use_ue8m0), per_token_cast_to_fp8(rows, use_ue8m0)
    assert_same_bits(got, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(5, 6, 200)}, "x: the last dimension must be a multiple of 128, got"),
        ({"x": torch.zeros(5, 768)}, r"x: shape must be \[T, H, d\], got \[5, 768\]"),
        ({"x": torch.zeros(5, 6, 128, dtype=torch.int32)}, "x: dtype must be"),
        ({"groups": 4}, "groups: must divide the 6 heads of x, got 4"),
        ({"groups": 0}, "groups: must be at least 1, got 0"),
        ({"cos": torch.zeros(4, 32)}, r"cos: shape must be \[5, R / 2\], got \[4, 32\]"),
        ({"sin": torch.zeros(5, 16)}, r"sin: shape must be \[5, 32\], got \[5, 16\]"),
        ({"cos": torch.zeros(5, 200), "sin": torch.zeros(5, 200)}, "x: the last dimension must be at least 400"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    given = dict(zip(("x", "cos", "sin"), operands())) | {"groups": 2} | change
    assert_refused(message, rotary_cast_to_fp8, **given)
