"""rms_norm_cast_to_fp8 (RMS norm and FP8 cast in one kernel) and add_rms_norm_cast_to_fp8 (which first adds a residual)
on the GPU: every kernel configuration, strides, and non-finite numbers."""

import pytest
import torch

from dsa.cases import cases_of
from tests.gpu.case_checks import FLOATS, by_sizes, check_far_rows, check_layouts, grid, verify

CASES = PLAIN, ADDED = cases_of("rms_norm_cast")
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
# The longest row of each kernel configuration and the next longer one, and the row lengths of models.
LENGTHS = [128, 256, 384, 512, 640, 1024, 1152, 1536, 2048, 2176, 4096, 4224, 6144, 7168, 8192]


@by_case
@by_sizes(
    grid(channels=LENGTHS, dtype=FLOATS, use_ue8m0=(True, False), eps=(1e-3,)),
    grid(channels=(8320, 16384), dtype=FLOATS[:2], use_ue8m0=(True, False), eps=(1e-3,)),
    grid(channels=(7168,), tokens=(1, 2, 5, 4096)),
)
def test_every_length_is_right(sizes, case, record_error):
    verify(case, sizes, record_error)


@by_case
def test_layouts_change_no_bit(case):
    check_layouts(case, ("x", "residual") if case is ADDED else ("x",), tokens=60, channels=512)


@by_case
def test_special_values_are_where_the_two_ops_have_them(case):
    """The rows from 30 on are all zeros, so with eps 0 the norm divides by 0."""
    given = case.arguments("cuda", tokens=40, channels=1536)
    for name in {"x", "residual"} & given.keys():
        given[name][30:], given[name][3, 5], given[name][17, -1] = 0.0, torch.nan, torch.inf
    given["x"][21, 0] = torch.nan
    case.check_call(given)
    case.check_call(given | {"eps": 0.0, "use_ue8m0": True})


@by_case
def test_offsets_beyond_32_bits(case):
    given = case.arguments("cuda", tokens=100, channels=7168)
    check_far_rows(case, given, [name for name in ("x", "residual") if name in given], 2**31 // 7168 + 50)
