"""Gate and up projection of experts, SwiGLU and cast: rows of no expert, wrong arguments."""

import re

import pytest
import torch

from dsa.cases import cases_of
from tests.reference.common import assert_refused, i32

CASES = cases_of("grouped_fp8_gemm_swiglu")
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@by_case
@pytest.mark.parametrize("use_ue8m0", [False, True])
@pytest.mark.parametrize("limit", [None, 1.5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [0, 5])
@pytest.mark.parametrize(("inner", "sizes"), [(128, [2, 0, 4]), (384, [2, 0, 4]), (128, [0, 1, 0]), (128, [0, 0, 0])])
def test_bits_of_product_and_cast(inner, sizes, tokens, dtype, limit, use_ue8m0, case):
    """Values and scales are NaN in rows from the last end on."""
    options = {"limit": limit, "use_ue8m0": use_ue8m0, "dtype": dtype}
    given = case.arguments(inner=inner, sizes=sizes, tokens=tokens, after=2, **options)
    found, used = case.run(given), sum(sizes)
    case.check(given, found)
    assert [x.shape for x in found] == [(used + 2, inner), (used + 2, inner // 128)]
    assert all(x[used:].float().isnan().all() and not x[:used].float().isnan().any() for x in found)


@by_case
def test_no_rows(case):
    values, scales = case.run(case.arguments(sizes=[0, 0, 0]))
    assert values.shape == (0, 128) and scales.shape == (0, 1)


@by_case
def test_half_of_the_columns_is_a_multiple_of_128(case):
    message = r"b\[0\]: N must be a multiple of 256, got 384"
    assert_refused(message, case.run, case.arguments(inner=192))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit": 0.0}, "limit: must be a positive number, got 0.0"),
        ({"rows": i32([5, 0, 0, 2])}, "rows: must be from 0 to 4, got 5 at 0"),
        ({"dtype": torch.float64}, "dtype: must be float32, bfloat16 or float16, got float64"),
        ({"rows": i32([4, 0, 0])}, "ends: must ascend from at least 0 to at most M=3 (as of rows), got [2, 2, 4]"),
        ({"use_ue8m0": 1}, "use_ue8m0: must be True or False, got int"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    assert_refused(re.escape(message), CASES[0].run, CASES[0].arguments() | options)
