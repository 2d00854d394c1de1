"""The reference of the expansion with projection: what it is made of, and what it takes."""

import pytest
import torch

from dsa import reference
from dsa.reference.elementwise.hyper_expand_mix import hyper_expand_mix
from tests.reference.common import assert_refused


def inputs(tokens=3, n=4, d=16, count=24):
    y, streams = torch.randn(tokens, d).bfloat16(), torch.randn(tokens, n, d).bfloat16()
    return y, streams, torch.randn(tokens, n), torch.randn(tokens, n, n), torch.randn(3, count, n * d).bfloat16()


@pytest.mark.parametrize(("n", "count"), [(4, 24), (1, 3), (2, 5)])
def test_is_its_parts(n, count):
    """The projection is of the new streams as they were rounded."""
    y, streams, post, comb, parts = inputs(n=n, count=count)
    new, mix = hyper_expand_mix(y, streams, post, comb, parts)
    assert torch.equal(new, reference.hyper_expand(y, streams, post, comb)) and new.dtype == torch.bfloat16
    assert torch.equal(mix, reference.hyper_mix(new, parts))
    exact = new.flatten(1).double() @ parts.double().sum(0).T
    torch.testing.assert_close(mix, exact.float(), atol=1e-3, rtol=1e-5)


def test_gradients():
    tensors = [x.requires_grad_() for x in inputs()]
    new, mix = hyper_expand_mix(*tensors)
    (new.float().square().sum() + mix.square().sum()).backward()
    for tensor in tensors:
        assert tensor.grad.isfinite().all() and tensor.grad.any()


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, torch.randn(3, 16), "y: dtype must be bfloat16, got float32"),
        (1, torch.randn(2, 4, 16).bfloat16(), r"streams: shape must be \[3, n, 16\], got \[2, 4, 16\]"),
        (2, torch.randn(3, 3), r"post: shape must be \[3, 4\]"),
        (3, torch.randn(3, 4, 3), r"comb: shape must be \[3, 4, 4\]"),
        (4, torch.zeros(3, 24, 63).bfloat16(), r"parts: shape must be \[3, C, 64\], got \[3, 24, 63\]"),
        (4, torch.zeros(3, 0, 64).bfloat16(), "parts: must have at least one row"),
    ],
)
def test_errors(at, value, message):
    arguments = [*inputs()]
    arguments[at] = value
    assert_refused(message, hyper_expand_mix, *arguments)
