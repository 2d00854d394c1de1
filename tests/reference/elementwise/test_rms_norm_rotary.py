"""The norm with rope behind it, its reference against float64."""

import pytest
import torch

from dsa.reference import rms_norm_rotary
from tests.reference.common import assert_refused
from tests.reference.formulas import rms_normed, rotated


def operands(tokens=5, heads=3, dim=80, channels=64):
    angles = torch.randn(tokens, channels // 2)
    return 3 * torch.randn(tokens, heads, dim), torch.randn(dim), angles


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("channels", [2, 64, 80])
def test_formula(channels, weighted):
    x, weight, angles = operands(channels=channels)
    weight = weight if weighted else None
    y = rms_norm_rotary(x, weight, angles.cos(), angles.sin(), 1e-2)
    expected = rotated(rms_normed(x, weight, 1e-2), angles.cos(), angles.sin())
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)


def test_rounds_in_front_of_the_rotation_and_behind_it():
    x, weight, angles = operands()
    x, quarter = x.bfloat16(), torch.full_like(angles, torch.pi / 4)
    y = rms_norm_rotary(x, weight, quarter.cos(), quarter.sin())
    normed = rms_norm_rotary(x, weight, torch.ones(5, 32), torch.zeros(5, 32)).float()
    a, b = normed[..., 16::2], normed[..., 17::2]
    turned = torch.stack(((a - b) * quarter.cos()[:, None], (a + b) * quarter.cos()[:, None]), -1).flatten(-2)
    assert torch.equal(y[..., :16].float(), normed[..., :16])
    torch.testing.assert_close(y[..., 16:].float(), turned, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(5, 80)}, r"x: shape must be \[T, H, D\], got \[5, 80\]"),
        ({"x": torch.zeros(5, 3, 56), "weight": None}, "x: the last dimension must be at least 64 for these cos and"),
        ({"weight": torch.zeros(8)}, r"weight: shape must be \[80\], got \[8\]"),
        ({"cos": torch.zeros(4, 32)}, r"cos: shape must be \[5, R / 2\], got \[4, 32\]"),
        ({"sin": torch.zeros(5, 8)}, r"sin: shape must be \[5, 32\], got \[5, 8\]"),
        ({"eps": -1.0}, "eps: must be"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    x, weight, angles = operands()
    given = {"x": x, "weight": weight, "cos": angles.cos(), "sin": angles.sin(), "eps": 1e-6} | change
    assert_refused(message, rms_norm_rotary, **given)
