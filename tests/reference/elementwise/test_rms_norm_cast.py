"""The references of the norm with a cast: dtypes, kinds of scales, and a sum with zeros."""

import pytest
import torch

from dsa.cases import cases_of
from dsa.reference import add_rms_norm_cast_to_fp8, rms_norm_cast_to_fp8
from tests.reference.common import assert_same_bits

PLAIN, ADDED = cases_of("rms_norm_cast")


@pytest.mark.parametrize("use_ue8m0", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("case", [PLAIN, ADDED], ids=lambda case: case.name)
def test_against_float64(case, dtype, use_ue8m0):
    case.verify(tokens=7, channels=384, dtype=dtype, use_ue8m0=use_ue8m0, eps=1e-2)


def test_a_residual_of_zeros_changes_nothing():
    given = PLAIN.arguments(tokens=7, channels=384)
    total, *rest = add_rms_norm_cast_to_fp8(**given, residual=torch.zeros_like(given["x"]))
    assert torch.equal(total, given["x"])
    assert_same_bits(rest, rms_norm_cast_to_fp8(**given))
