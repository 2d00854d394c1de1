"""The reference of the norm with rope: channels, rounding and wrong arguments."""

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.reference import rms_norm_rotary
from tests.reference.common import assert_refused

(CASE,) = cases_of("rms_norm_rotary")


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("rotated", [2, 64, 80])
def test_against_float64(rotated, weighted):
    CASE.verify(tokens=5, channels=80, rotated=rotated, dtype=torch.float32, weighted=weighted)


def test_rounds_before_the_rotation_and_after_it():
    given = CASE.arguments(tokens=5, heads=3)
    cos = torch.full((5, 32), torch.pi / 4).cos()
    y = rms_norm_rotary(**given | {"cos": cos, "sin": cos})
    normed = rms_norm_rotary(**given | {"cos": torch.ones(5, 32), "sin": torch.zeros(5, 32)}).float()
    a, b = normed[..., 16::2], normed[..., 17::2]
    rotated = torch.stack(((a - b) * cos[:, None], (a + b) * cos[:, None]), -1).flatten(-2)
    assert torch.equal(y[..., :16].float(), normed[..., :16])
    torch.testing.assert_close(y[..., 16:].float(), rotated, rtol=2**-8, atol=1e-6)


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
    assert_refused(message, dsa.rms_norm_rotary, **CASE.arguments(tokens=5) | change)
