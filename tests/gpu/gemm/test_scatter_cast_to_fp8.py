"""The scattered FP8 cast on the GPU: the bytes of the plain cast, in the rows of the experts."""

import pytest
import torch

from dsa.cases import cases_of
from dsa.testing import poison_free_memory

(CASE,) = cases_of("scatter_cast_to_fp8")


@pytest.mark.parametrize("use_ue8m0", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens, channels, k", [(1, 128, 1), (3, 7168, 8), (257, 4096, 6), (4096, 640, 8)])
def test_bits(tokens, channels, k, dtype, use_ue8m0, record_error):
    poison_free_memory(mebibytes=64)
    record_error(CASE.verify("cuda", tokens=tokens, channels=channels, k=k, dtype=dtype, use_ue8m0=use_ue8m0))


def test_places_outside_are_not_written():
    given = CASE.arguments("cuda", tokens=64)
    places = given["places"]
    places[::2, 0], places[1::4, 1], places[3::4, 1] = -1, 2**31 - 1, 128
    CASE.check(given, CASE.run(given))
