"""The Hadamard transform against its matrix."""

import pytest
import torch

from dsa.cases.gemm import sylvester
from dsa.reference import hadamard_transform
from tests.reference.common import assert_refused


@pytest.mark.parametrize("n", [1, 2, 8, 64, 128])
def test_against_the_explicit_matrix(n):
    x = torch.randn(3, 5, n)
    expected = x.double() @ sylvester(n).T
    torch.testing.assert_close(hadamard_transform(x).double(), expected / n**0.5, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hadamard_transform(x, scale=1.0).double(), expected, rtol=1e-5, atol=1e-5)


def test_rounds_once_to_the_input_dtype():
    x = torch.randn(4, 128).bfloat16()
    assert torch.equal(hadamard_transform(x), hadamard_transform(x.float()).bfloat16())


def test_no_rows():
    assert hadamard_transform(torch.zeros(0, 128)).shape == (0, 128)


@pytest.mark.parametrize("n", [0, 3, 96])
def test_refuses_other_lengths(n):
    assert_refused(f"x: the last dimension must be a power of two, got {n}", hadamard_transform, torch.zeros(2, n))
