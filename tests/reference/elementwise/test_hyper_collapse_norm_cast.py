"""The reference of the collapse with norm and cast: numbers of streams, options and wrong arguments."""

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.reference import hyper_collapse_norm_cast_to_fp8
from tests.reference.common import assert_refused

(CASE,) = cases_of("hyper_collapse_norm_cast")


@pytest.mark.parametrize("use_ue8m0", [True, False])
@pytest.mark.parametrize("n", [1, 4])
def test_every_option_reaches_its_part(n, use_ue8m0):
    """The options are large and differ."""
    options = {"iterations": 2, "eps": 0.5, "hc_eps": 0.25, "norm_eps": 2.0, "use_ue8m0": use_ue8m0}
    CASE.verify(n=n, **options)


def test_results_have_no_gradient():
    given = CASE.arguments()
    given["streams"].requires_grad_()
    assert not any(x.requires_grad for x in hyper_collapse_norm_cast_to_fp8(**given))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"streams": torch.randn(3, 4, 256)}, "streams: dtype must be bfloat16, got float32"),
        ({"mix": torch.randn(3, 23)}, r"mix: shape must be \[3, 24\], got \[3, 23\]"),
        ({"base": torch.randn(20)}, r"base: shape must be \[24\]"),
        ({"scale": torch.randn(1)}, r"scale: shape must be \[3\]"),
        ({"weight": torch.randn(128)}, r"weight: shape must be \[256\], got \[128\]"),
        (CASE.arguments(n=4, channels=192), "streams: D must be a multiple of 128, at least 128, got 192"),
        (CASE.arguments(n=4, channels=0), "streams: D must be a multiple of 128, at least 128, got 0"),
        (CASE.arguments(n=0, channels=256), "streams: n must be at least 1, got 0"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    assert_refused(message, dsa.hyper_collapse_norm_cast_to_fp8, **CASE.arguments() | change)
