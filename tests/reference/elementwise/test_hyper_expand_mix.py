"""The reference of the expansion with projection: numbers of streams and outputs, gradients and wrong arguments."""

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.reference import hyper_expand_mix
from tests.reference.common import assert_refused

(CASE,) = cases_of("hyper_expand_mix")


@pytest.mark.parametrize(("n", "outputs"), [(4, 24), (1, 3), (2, 5)])
def test_against_float64(n, outputs):
    CASE.verify(n=n, outputs=outputs)


def test_gradients():
    given = {name: x.requires_grad_() for name, x in CASE.arguments().items()}
    new, mix = hyper_expand_mix(**given)
    (new.float().square().sum() + mix.square().sum()).backward()
    for tensor in given.values():
        assert tensor.grad.isfinite().all() and tensor.grad.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": torch.randn(3, 16)}, "y: dtype must be bfloat16, got float32"),
        ({"streams": torch.randn(2, 4, 16).bfloat16()}, r"streams: shape must be \[3, n, 16\], got \[2, 4, 16\]"),
        ({"post": torch.randn(3, 3)}, r"post: shape must be \[3, 4\]"),
        ({"comb": torch.randn(3, 4, 3)}, r"comb: shape must be \[3, 4, 4\]"),
        ({"parts": torch.zeros(3, 24, 63).bfloat16()}, r"parts: shape must be \[3, C, 64\], got \[3, 24, 63\]"),
        ({"parts": torch.zeros(3, 0, 64).bfloat16()}, "parts: C must be at least 1, got 0"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    assert_refused(message, dsa.hyper_expand_mix, **CASE.arguments() | change)
