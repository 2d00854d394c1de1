"""The reference of RMSNorm: gradients."""

import torch

from dsa.cases.elementwise import rms_normed
from dsa.reference import rms_norm
from tests.reference.common import assert_same_gradients


def test_gradients_are_those_of_the_formula():
    inputs = torch.randn(3, 16), torch.randn(16)
    assert_same_gradients(lambda *x: rms_norm(*x, 1e-3), lambda *x: rms_normed(*x, 1e-3), inputs)
