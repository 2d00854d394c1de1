"""The reference of the streams' projection: sizes, strides, gradients and wrong arguments."""

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.reference import hyper_mix
from tests.reference.common import assert_refused

(CASE,) = cases_of("hyper_mix")


@pytest.mark.parametrize(
    ("tokens", "n", "channels", "outputs"), [(5, 4, 6, 24), (3, 1, 7, 1), (2, 3, 16, 4), (0, 4, 8, 24)]
)
def test_against_float64(tokens, n, channels, outputs):
    CASE.verify(tokens=tokens, n=n, channels=channels, outputs=outputs)


@pytest.mark.parametrize("n", [1, 4])
def test_strides_change_no_bit(n):
    """PyTorch sums the products of column-major matrices in another order."""
    given = CASE.arguments(n=n, channels=64)
    transposed = {name: x.transpose(0, -1).contiguous().transpose(0, -1) for name, x in given.items()}
    assert torch.equal(hyper_mix(**transposed), hyper_mix(**given))


def test_gradients():
    given = {name: x.requires_grad_() for name, x in CASE.arguments().items()}
    hyper_mix(**given).square().sum().backward()
    for tensor in given.values():
        assert tensor.grad.isfinite().all() and tensor.grad.any()


STREAMS, PARTS = torch.zeros(3, 4, 8).bfloat16(), torch.zeros(3, 24, 32).bfloat16()


@pytest.mark.parametrize(
    ("streams", "parts", "message"),
    [
        (STREAMS, PARTS[..., :31], r"parts: shape must be \[3, C, 32\], got \[3, 24, 31\]"),
        (STREAMS, PARTS[:2], r"parts: shape must be \[3, C, 32\]"),
        (STREAMS, PARTS[:, :0], "parts: C must be at least 1, got 0"),
        (STREAMS[..., :0], PARTS[..., :0], "streams: D must be at least 1, got 0"),
        (STREAMS[:, 0], PARTS, r"streams: shape must be \[T, n, D\]"),
        (STREAMS.float(), PARTS, "streams: dtype must be bfloat16, got float32"),
        (STREAMS, PARTS.float(), "parts: dtype must be bfloat16, got float32"),
    ],
)
def test_wrong_arguments_are_named(streams, parts, message):
    assert_refused(message, dsa.hyper_mix, streams, parts)
