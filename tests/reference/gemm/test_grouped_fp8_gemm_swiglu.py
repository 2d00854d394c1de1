"""The references of the fused grouped product, SwiGLU and cast (FP8 and FP4 weights): results are right, and rows that
belong to no expert are NaN."""

import pytest
import torch

from dsa.cases import cases_of


@pytest.mark.parametrize("case", cases_of("grouped_fp8_gemm_swiglu"), ids=lambda case: case.name)
@pytest.mark.parametrize("use_ue8m0", [False, True])
@pytest.mark.parametrize("limit", [None, 1.5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [0, 5])
@pytest.mark.parametrize(
    ("inner", "sizes", "after"),
    [(128, [2, 0, 4], 2), (384, [2, 0, 4], 2), (128, [0, 1, 0], 2), (128, [0, 0, 0], 2), (128, [0, 0, 0], 0)],
)
def test_rows_from_the_last_end_on_are_nan(inner, sizes, after, tokens, dtype, limit, use_ue8m0, case):
    options = {"limit": limit, "use_ue8m0": use_ue8m0, "dtype": dtype}
    given = case.arguments(inner=inner, sizes=sizes, tokens=tokens, after=after, **options)
    found, used = case.run(given), sum(sizes)
    case.check(given, found)
    assert [x.shape for x in found] == [(used + after, inner), (used + after, inner // 128)]
    assert all(x[used:].float().isnan().all() and not x[:used].float().isnan().any() for x in found)
