"""The reference of scatter_cast_to_fp8: row indices outside the result, and empty inputs."""

import pytest
import torch

from dsa.reference import per_token_cast_to_fp8, scatter_cast_to_fp8
from tests.reference.common import INT32, i32, zeros


def test_places_outside_are_ignored():
    """The result has 4 rows. Rows without a token are zero, with scales of 1."""
    x = torch.randn(2, 128)
    q, scale = scatter_cast_to_fp8(x, i32([[3, -1], [4, 0]]))
    expected, scales = per_token_cast_to_fp8(x)
    assert torch.equal(q.float()[[3, 0]], expected.float()) and not q.float()[[1, 2]].any()
    assert torch.equal(scale[[3, 0]], scales) and scale[[1, 2]].tolist() == [[1.0], [1.0]]


@pytest.mark.parametrize("shape, k", [((0, 256), 2), ((3, 0), 2), ((3, 256), 0)])
def test_nothing_to_cast(shape, k):
    q, scale = scatter_cast_to_fp8(zeros(*shape), zeros(shape[0], k, dtype=INT32))
    assert q.shape == (shape[0] * k, shape[1]) and scale.shape == (shape[0] * k, shape[1] // 128)
