"""scatter_cast_to_fp8 on the GPU: all k rows of a token in the results (`places`) have the bits of
per_token_cast_to_fp8."""

import pytest
import torch

from dsa.cases import cases_of
from tests.gpu.attention import checked
from tests.gpu.case_checks import by_sizes, grid, verify

(CASE,) = cases_of("scatter_cast_to_fp8")


@pytest.mark.parametrize("tokens, channels, k", [(1, 128, 1), (3, 7168, 8), (257, 4096, 6), (4096, 640, 8)])
@by_sizes(grid(dtype=(torch.bfloat16, torch.float16, torch.float32), use_ue8m0=(True, False)))
def test_every_shape_is_right(sizes, tokens, channels, k, record_error):
    verify(CASE, sizes | {"tokens": tokens, "channels": channels, "k": k}, record_error)


def test_places_outside_are_not_written():
    given = CASE.arguments("cuda", tokens=64)
    places = given["places"]
    places[::2, 0], places[1::4, 1], places[3::4, 1] = -1, 2**31 - 1, 128
    checked(CASE, given)
