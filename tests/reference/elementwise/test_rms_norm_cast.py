"""The reference of the norm with a cast against float64, and what it rounds in between."""

import pytest
import torch

from dsa.reference.elementwise import rms_norm_cast as reference
from tests.reference.common import assert_same_bits
from tests.reference.formulas import rms_normed


def inputs(dtype):
    x, residual = (3 * torch.randn(7, 384).to(dtype) for _ in range(2))
    return x, residual, torch.randn(384)


@pytest.mark.parametrize("use_ue8m0", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_against_float64(dtype, use_ue8m0):
    x, residual, weight = inputs(dtype)
    total, y, q, scale = reference.add_rms_norm_cast_to_fp8(x, residual, weight, 1e-2, use_ue8m0)
    assert torch.equal(total, (x.double() + residual.double()).to(dtype))
    torch.testing.assert_close(y.double(), rms_normed(total, weight, 1e-2), rtol=torch.finfo(dtype).eps, atol=1e-6)
    # A scale is of y as it was rounded, and a byte the value that is nearest to y over its scale.
    groups = y.double().unflatten(1, (3, 128))
    exact = groups.abs().amax(-1) / 448
    if use_ue8m0:
        exact = exact.log2().ceil().exp2()
    torch.testing.assert_close(scale.double(), exact, rtol=3e-7, atol=0.0)
    off = (q.double().unflatten(1, (3, 128)) * scale.double()[..., None] - groups).abs()
    assert (off <= groups.abs() / 16 * 1.0001 + scale.double()[..., None] / 1024 * 1.0001).all()


def test_without_a_residual_it_is_that_of_x():
    x, _, weight = inputs(torch.bfloat16)
    alone = reference.rms_norm_cast_to_fp8(x, weight, 1e-2)
    added = reference.add_rms_norm_cast_to_fp8(x, torch.zeros_like(x), weight, 1e-2)
    assert torch.equal(added[0], x)
    assert_same_bits(alone, added[1:])
