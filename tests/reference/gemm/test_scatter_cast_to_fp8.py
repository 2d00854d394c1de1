"""FP8 cast of tokens to the rows of their experts: places outside, nothing to cast, wrong arguments."""

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.reference import per_token_cast_to_fp8, scatter_cast_to_fp8
from tests.reference.common import assert_refused


@pytest.mark.parametrize("use_ue8m0", [True, False])
def test_against_float64(use_ue8m0):
    cases_of("scatter_cast_to_fp8")[0].verify(use_ue8m0=use_ue8m0)


def test_places_outside_are_ignored():
    """Rows without a token are zero, with scales of 1."""
    x = torch.randn(2, 128)
    q, scale = scatter_cast_to_fp8(x, torch.tensor([[3, -1], [4, 0]], dtype=torch.int32))
    expected, scales = per_token_cast_to_fp8(x)
    assert torch.equal(q.float()[[3, 0]], expected.float()) and not q.float()[[1, 2]].any()
    assert torch.equal(scale[[3, 0]], scales) and scale[[1, 2]].tolist() == [[1.0], [1.0]]


@pytest.mark.parametrize("shape, k", [((0, 256), 2), ((3, 0), 2), ((3, 256), 0)])
def test_empty(shape, k):
    q, scale = scatter_cast_to_fp8(torch.zeros(shape), torch.zeros(shape[0], k, dtype=torch.int32))
    assert q.shape == (shape[0] * k, shape[1]) and scale.shape == (shape[0] * k, shape[1] // 128)


@pytest.mark.parametrize(
    ("x", "places", "message"),
    [
        (torch.zeros(2, 100), torch.zeros(2, 1, dtype=torch.int32), "x: K must be a multiple of 128"),
        (torch.zeros(2, 128), torch.zeros(3, 1, dtype=torch.int32), r"places: .*shape"),
        (torch.zeros(2, 128), torch.zeros(2, 1), "places: dtype must be"),
        (torch.zeros(2, 128).int(), torch.zeros(2, 1, dtype=torch.int32), "x: dtype must be"),
    ],
)
def test_wrong_arguments_are_named(x, places, message):
    assert_refused(message, dsa.scatter_cast_to_fp8, x, places)
