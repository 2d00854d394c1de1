"""The reference of the streams' projection against float64, and the matrices that it takes."""

import pytest
import torch

from dsa.reference.elementwise.hyper_mix import hyper_mix
from tests.reference.common import assert_refused


def split(weight):
    high = weight.bfloat16()
    middle = (weight - high.float()).bfloat16()
    return torch.stack((high, middle, (weight - high.float() - middle.float()).bfloat16()))


@pytest.mark.parametrize(("tokens", "n", "d", "count"), [(5, 4, 6, 24), (3, 1, 7, 1), (2, 3, 16, 4), (0, 4, 8, 24)])
def test_formula(tokens, n, d, count):
    streams, weight = torch.randn(tokens, n, d).bfloat16(), torch.randn(count, n * d)
    mix = hyper_mix(streams, split(weight))
    assert mix.shape == (tokens, count) and mix.dtype == torch.float32
    torch.testing.assert_close(mix, (streams.flatten(1).double() @ weight.double().T).float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("n", [1, 4])
def test_strides_change_no_bit(n):
    """Of a product of column-major matrices PyTorch's sums are in another order."""
    streams, parts = torch.randn(3, n, 64).bfloat16(), torch.randn(3, 24, n * 64).bfloat16()
    transposed = [x.transpose(0, -1).contiguous().transpose(0, -1) for x in (streams, parts)]
    assert torch.equal(hyper_mix(*transposed), hyper_mix(streams, parts))


def test_gradients():
    streams, parts = (torch.randn(s).bfloat16().requires_grad_() for s in ((2, 4, 3), (3, 24, 12)))
    hyper_mix(streams, parts).square().sum().backward()
    for tensor in (streams, parts):
        assert tensor.grad.isfinite().all() and tensor.grad.any()


STREAMS, PARTS = torch.zeros(3, 4, 8).bfloat16(), torch.zeros(3, 24, 32).bfloat16()


@pytest.mark.parametrize(
    ("streams", "parts", "message"),
    [
        (STREAMS, PARTS[..., :31], r"parts: shape must be \[3, C, 32\], got \[3, 24, 31\]"),
        (STREAMS, PARTS[:2], r"parts: shape must be \[3, C, 32\]"),
        (STREAMS, PARTS[:, :0], "parts: must have at least one row"),
        (STREAMS[..., :0], PARTS[..., :0], "streams: must have at least one stream and one channel"),
        (STREAMS[:, 0], PARTS, r"streams: shape must be \[T, n, D\]"),
        (STREAMS.float(), PARTS, "streams: dtype must be bfloat16, got float32"),
        (STREAMS, PARTS.float(), "parts: dtype must be bfloat16, got float32"),
    ],
)
def test_wrong_arguments_are_named(streams, parts, message):
    assert_refused(message, hyper_mix, streams, parts)
