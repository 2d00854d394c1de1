"""Rotation of heads and FP8 cast: groups and wrong arguments."""

import pytest
import torch

import dsa
from dsa.cases import cases_of
from tests.reference.common import assert_refused

(CASE,) = cases_of("rotary_cast_to_fp8")
SIZES = {"tokens": 5, "heads": 6, "dim": 256}


@pytest.mark.parametrize("use_ue8m0", [True, False])
@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_groups(groups, use_ue8m0):
    CASE.verify(**SIZES, groups=groups, use_ue8m0=use_ue8m0)


def test_no_tokens():
    q, scale = CASE.run(CASE.arguments(**SIZES | {"tokens": 0}))
    assert q.shape == (0, 768) and scale.shape == (0, 6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(5, 6, 200)}, "x: d must be a multiple of 128, got 200"),
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
    assert_refused(message, dsa.rotary_cast_to_fp8, **CASE.arguments(**SIZES) | change)
