"""rotary_cast_to_fp8 on the GPU has the bits of apply_rotary followed by per_token_cast_to_fp8."""

import pytest
import torch

from dsa.cases import cases_of
from dsa.cases.gemm import bits
from tests.gpu.case_checks import FLOATS, by_sizes, check_layouts, grid, verify

(CASE,) = cases_of("rotary_cast_to_fp8")
SHAPES = [(1, 64, 512, 64, 8), (1, 128, 512, 64, 16), (4, 8, 512, 64, 8), (1, 1, 128, 8, 1), (3, 6, 128, 128, 2),
          (17, 6, 256, 136, 3), (300, 64, 512, 64, 1), (2049, 32, 512, 64, 4)]  # fmt: skip


@pytest.mark.parametrize("tokens, heads, dim, rotated, groups", SHAPES)
@by_sizes(grid(dtype=FLOATS, use_ue8m0=(True, False)))
def test_every_shape_is_right(sizes, tokens, heads, dim, rotated, groups, record_error):
    shape = {"tokens": tokens, "heads": heads, "dim": dim, "rotated": rotated, "groups": groups}
    verify(CASE, sizes | shape, record_error)


@pytest.mark.parametrize("heads, groups", [(12, 2), (1, 1)])
def test_layouts_change_no_bit(heads, groups):
    check_layouts(CASE, ("x", "cos", "sin"), tokens=40, heads=heads, dim=512, groups=groups, use_ue8m0=True)


def test_nan_stays_in_its_group():
    given = CASE.arguments("cuda", tokens=5, dim=256)
    whole = CASE.run(given)
    given["x"][2, 1, 250] = torch.nan
    # The NaN is in group 0, in the second half of the second head: columns 384 to 511 of q, column 3 of scale.
    for found, right, columns in zip(CASE.run(given), whole, (slice(384, 512), slice(3, 4))):
        differs = bits(found) != bits(right)
        assert differs[2, columns].all() and differs.sum() == differs[2, columns].numel()
        assert found[2, columns].float().isnan().all()
