"""The references of the norm and of its fused forms: gradients, roundings, and a residual of zeros."""

import torch

from dsa.cases import cases_of
from dsa.cases.elementwise import rms_normed
from dsa.reference import add_rms_norm_cast_to_fp8, rms_norm, rms_norm_cast_to_fp8, rms_norm_rotary
from tests.reference.common import assert_same_bits, assert_same_gradients


def test_gradients_are_those_of_the_formula():
    inputs = torch.randn(3, 16), torch.randn(16)
    assert_same_gradients(lambda *x: rms_norm(*x, 1e-3), lambda *x: rms_normed(*x, 1e-3), inputs)


def test_a_residual_of_zeros_changes_nothing():
    given = cases_of("rms_norm_cast")[0].arguments(tokens=7, channels=384)
    total, *rest = add_rms_norm_cast_to_fp8(**given, residual=torch.zeros_like(given["x"]))
    assert torch.equal(total, given["x"])
    assert_same_bits(rest, rms_norm_cast_to_fp8(**given))


def test_heads_are_rounded_before_the_rotation_and_after_it():
    given = cases_of("rms_norm_rotary")[0].arguments(tokens=5, heads=3)
    cos = torch.full((5, 32), torch.pi / 4).cos()
    y = rms_norm_rotary(**given | {"cos": cos, "sin": cos})
    normed = rms_norm_rotary(**given | {"cos": torch.ones(5, 32), "sin": torch.zeros(5, 32)}).float()
    a, b = normed[..., 16::2], normed[..., 17::2]
    rotated = torch.stack(((a - b) * cos[:, None], (a + b) * cos[:, None]), -1).flatten(-2)
    assert torch.equal(y[..., :16].float(), normed[..., :16])
    torch.testing.assert_close(y[..., 16:].float(), rotated, rtol=2**-8, atol=1e-6)
