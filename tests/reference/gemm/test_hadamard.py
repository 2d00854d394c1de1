"""The reference of the Hadamard transform: compared with a product with the transform's matrix, rounding, and refused
lengths."""

import pytest
import torch

from dsa.cases.gemm import sylvester
from dsa.reference import hadamard_transform
from tests.reference.common import assert_close, assert_refused


@pytest.mark.parametrize("n", [1, 2, 8, 64, 128])
@pytest.mark.parametrize("rows", [0, 3])
def test_against_the_explicit_matrix(rows, n):
    x = torch.randn(rows, 5, n)
    expected = x.double() @ sylvester(n).T
    assert_close([hadamard_transform(x), hadamard_transform(x, scale=1.0)], [expected / n**0.5, expected])


def test_results_are_rounded_once():
    x = torch.randn(4, 128).bfloat16()
    assert torch.equal(hadamard_transform(x), hadamard_transform(x.float()).bfloat16())


@pytest.mark.parametrize("n", [0, 3, 96])
def test_other_lengths_are_refused(n):
    assert_refused(f"x: the last dimension must be a power of two, got {n}", hadamard_transform, torch.zeros(2, n))
