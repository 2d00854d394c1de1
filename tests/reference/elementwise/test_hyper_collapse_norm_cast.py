"""The reference of the collapse with norm and cast: what it is made of, and what it takes."""

import pytest
import torch

from dsa import reference
from dsa.reference.elementwise.hyper_collapse_norm_cast import hyper_collapse_norm_cast_to_fp8
from tests.reference.common import assert_refused, assert_same_bits


def inputs(tokens=3, n=4, d=256):
    count = (2 + n) * n
    tensors = torch.randn(tokens, n, d).bfloat16(), torch.randn(tokens, count), torch.randn(count), torch.randn(3)
    return *tensors, torch.randn(d)


@pytest.mark.parametrize("use_ue8m0", [True, False])
@pytest.mark.parametrize("n", [1, 4])
def test_is_its_parts(n, use_ue8m0):
    """Every option reaches its function: they are large, and differ."""
    *streams, weight = inputs(n=n)
    options = {"iterations": 2, "eps": 0.5, "hc_eps": 0.25}
    got = hyper_collapse_norm_cast_to_fp8(*streams, weight, **options, norm_eps=2.0, use_ue8m0=use_ue8m0)
    x, *weights = reference.hyper_collapse(*streams, **options)
    expected = *reference.rms_norm_cast_to_fp8(x, weight, 2.0, use_ue8m0), *weights
    assert_same_bits(got, expected)
    assert not torch.equal(got[0], reference.rms_norm_cast_to_fp8(x, weight, 1e-6, use_ue8m0)[0])


def test_results_have_no_gradient():
    streams, *rest = inputs()
    assert not any(x.requires_grad for x in hyper_collapse_norm_cast_to_fp8(streams.requires_grad_(), *rest))


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, torch.randn(3, 4, 256), "streams: dtype must be bfloat16, got float32"),
        (1, torch.randn(3, 23), r"mix: shape must be \[3, 24\], got \[3, 23\]"),
        (2, torch.randn(20), r"base: shape must be \[24\]"),
        (3, torch.randn(1), r"scale: shape must be \[3\]"),
        (4, torch.randn(128), r"weight: shape must be \[256\], got \[128\]"),
    ],
)
def test_wrong_arguments_are_named(at, value, message):
    arguments = [*inputs()]
    arguments[at] = value
    assert_refused(message, hyper_collapse_norm_cast_to_fp8, *arguments)


@pytest.mark.parametrize(("n", "d"), [(4, 192), (4, 0), (0, 256)])
def test_sizes_that_are_not_taken(n, d):
    message = "streams: must have at least one stream and D a multiple of 128, got shape"
    assert_refused(message, hyper_collapse_norm_cast_to_fp8, *inputs(n=n, d=d))
