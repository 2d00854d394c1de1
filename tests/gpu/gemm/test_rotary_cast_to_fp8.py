"""Rotation of heads and cast on the GPU: the bytes of the rotation and then the cast."""

import pytest
import torch

from dsa.cases import cases_of
from dsa.cases.gemm import bits
from dsa.testing import poison_free_memory

(CASE,) = cases_of("rotary_cast_to_fp8")


@pytest.mark.parametrize("use_ue8m0", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "tokens, heads, dim, rotated, groups",
    [(1, 64, 512, 64, 8), (1, 128, 512, 64, 16), (4, 8, 512, 64, 8), (1, 1, 128, 8, 1), (3, 6, 128, 128, 2),
     (17, 6, 256, 136, 3), (300, 64, 512, 64, 1), (2049, 32, 512, 64, 4)],
)  # fmt: skip
def test_bits(tokens, heads, dim, rotated, groups, dtype, use_ue8m0):
    sizes = {"tokens": tokens, "heads": heads, "dim": dim, "rotated": rotated, "groups": groups}
    poison_free_memory(mebibytes=64)
    CASE.verify("cuda", **sizes, dtype=dtype, use_ue8m0=use_ue8m0)


def test_strided_heads_and_angles():
    given = CASE.arguments("cuda", tokens=40, heads=12, dim=640, rotated=136, use_ue8m0=True)
    x, cos, sin = given["x"], given["cos"][:, 4:36], given["sin"][:, 36:68]
    for part in (x[..., :512], x[:, ::2, 128:], x[:, 4:8, :128], x.transpose(0, 1).contiguous().transpose(0, 1)):
        strided = given | {"x": part, "cos": cos, "sin": sin}
        CASE.check(strided, CASE.run(strided))


def test_nan_stays_in_its_group():
    given = CASE.arguments("cuda", tokens=5, dim=256)
    whole = CASE.run(given)
    given["x"][2, 1, 250] = torch.nan
    # Group 0, the second 128 channels of the second head.
    for found, right, columns in zip(CASE.run(given), whole, (slice(384, 512), slice(3, 4))):
        differs = bits(found) != bits(right)
        assert differs[2, columns].all() and differs.sum() == differs[2, columns].numel()
        assert found[2, columns].float().isnan().all()
