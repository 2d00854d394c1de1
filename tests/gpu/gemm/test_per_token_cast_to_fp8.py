"""The FP8 cast on the GPU has the bits of the reference. If scales are not powers of two, the reference runs on the
GPU, because a CPU rounds them differently (see `check_token_cast`)."""

import pytest
import torch

from dsa.cases import cases_of
from tests.gpu.attention import checked
from tests.gpu.case_checks import FLOATS, by_sizes, check_far_rows, check_layouts, grid, verify

(CASE,) = cases_of("per_token_cast_to_fp8")
KINDS = grid(use_ue8m0=(True, False), hadamard=(False, True))


@pytest.mark.parametrize("shape", [(1, 128), (3, 7168), (257, 640), (4096, 1536), (5, 64, 128)])
@by_sizes(grid(dtype=FLOATS, use_ue8m0=(True, False), hadamard=(False, True)))
def test_every_shape_has_the_bits_of_the_reference(sizes, shape, record_error):
    verify(CASE, sizes | {"shape": shape}, record_error)


@pytest.mark.parametrize("use_ue8m0", [True, False])
def test_scales_at_and_next_to_every_power_of_two_are_right(use_ue8m0):
    amax = 448.0 * torch.exp2(torch.arange(-24, 119, dtype=torch.float64)).float()
    amax = torch.stack([amax.nextafter(torch.zeros(1)), amax, amax.nextafter(torch.full((1,), torch.inf))])
    x = torch.rand(*amax.shape, 128) * 2 - 1
    x[..., 17] = 1.0
    given = {"x": (x * amax[..., None]).cuda(), "use_ue8m0": use_ue8m0, "gran_k": 128, "hadamard": False}
    checked(CASE, given)


@by_sizes(KINDS)
def test_special_values_have_the_bits_of_the_reference(sizes):
    given = CASE.arguments("cuda", shape=(8, 256), **sizes)
    x, info = given["x"], torch.finfo(torch.bfloat16)
    x[1], x[2] = 0.0, -0.0
    x[3, 5], x[4, 200], x[5, 7] = torch.nan, torch.inf, -torch.inf
    x[6], x[7] = info.tiny / 4, info.max
    checked(CASE, given)


@pytest.mark.parametrize("shape", [(64, 512), (6, 4, 128)])
@by_sizes(KINDS)
def test_layouts_change_no_bit(sizes, shape):
    check_layouts(CASE, ("x",), shape=shape, **sizes)


def test_offsets_beyond_32_bits():
    check_far_rows(CASE, CASE.arguments("cuda", shape=(3, 7168)), ("x",), 340_000)
