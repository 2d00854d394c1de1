"""The hyper-connections' reference against the definition, number by number."""

import pytest
import torch

from dsa import reference
from tests.reference.common import assert_refused

EPS, HC_EPS = 1e-3, 1e-2  # large, so that leaving one out shows


def inputs(tokens=3, n=4, d=6, dtype=torch.float32):
    count = (2 + n) * n
    streams, y = torch.randn(tokens, n, d).to(dtype), torch.randn(tokens, d).to(dtype)
    return streams, y, torch.randn(tokens, count), torch.randn(count), torch.randn(3)


def by_hand(streams, mix, base, scale, iterations):
    """x, post, comb in float64."""
    streams, n = streams.double(), streams.shape[1]
    root = (streams.flatten(1).square().mean(1, keepdim=True) + EPS).sqrt()
    z = mix.double() / root * scale.double().repeat_interleave(torch.tensor([n, n, n * n])) + base.double()
    pre, post, comb = z.split((n, n, n * n), 1)
    comb = comb.view(-1, n, n).softmax(2) + HC_EPS
    for step in range(2 * iterations - 1):
        comb = comb / (comb.sum(2 if step % 2 else 1, keepdim=True) + HC_EPS)
    return torch.einsum("tn,tnd->td", pre.sigmoid() + HC_EPS, streams), 2 * post.sigmoid(), comb


@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_collapse(n, iterations, tokens):
    streams, _, mix, base, scale = inputs(tokens, n)
    got = reference.hyper_collapse(streams, mix, base, scale, iterations=iterations, eps=EPS, hc_eps=HC_EPS)
    for ours, expected in zip(got, by_hand(streams, mix, base, scale, iterations), strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_expand(n, tokens):
    streams, y, *_ = inputs(tokens, n)
    post, comb = torch.randn(tokens, n), torch.randn(tokens, n, n)
    got = reference.hyper_expand(y, streams, post, comb)
    expected = post[..., None] * y[:, None] + torch.einsum("tjk,tjd->tkd", comb, streams)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounded_once(dtype):
    streams, y, mix, base, scale = inputs(dtype=dtype)
    x, post, comb = reference.hyper_collapse(streams, mix, base, scale)
    exact = reference.hyper_collapse(streams.float(), mix, base, scale)
    assert x.dtype == dtype and torch.equal(x, exact[0].to(dtype))
    assert torch.equal(post, exact[1]) and torch.equal(comb, exact[2])
    new = reference.hyper_expand(y, streams, post, comb)
    assert new.dtype == dtype
    assert torch.equal(new, reference.hyper_expand(y.float(), streams.float(), post, comb).to(dtype))


def test_gradients():
    tensors = [x.requires_grad_() for x in inputs(tokens=2, d=3)]
    streams, y, mix, base, scale = tensors
    x, post, comb = reference.hyper_collapse(streams, mix, base, scale)
    (reference.hyper_expand(y, streams, post, comb).square().sum() + x.square().sum()).backward()
    for tensor in tensors:
        assert tensor.grad.isfinite().all() and tensor.grad.any()


@pytest.mark.parametrize("n", [1, 2, 4])
def test_head_is_the_stream_that_goes_into_a_sublayer(n):
    streams, _, mix, base, scale = inputs(n=n)
    got = reference.hyper_head(streams, mix[:, :n], base[:n], scale[:1], eps=EPS, hc_eps=HC_EPS)
    torch.testing.assert_close(got.double(), by_hand(streams, mix, base, scale, 1)[0], rtol=1e-5, atol=1e-5)


COLLAPSE = {
    "streams": torch.zeros(3, 4, 6),
    "mix": torch.zeros(3, 24),
    "base": torch.zeros(24),
    "scale": torch.zeros(3),
}
EXPAND = {
    "y": torch.zeros(3, 6),
    "streams": torch.zeros(3, 4, 6),
    "post": torch.zeros(3, 4),
    "comb": torch.zeros(3, 4, 4),
}
HEAD = {"streams": torch.zeros(3, 4, 6), "mix": torch.zeros(3, 4), "base": torch.zeros(4), "scale": torch.zeros(1)}


@pytest.mark.parametrize(
    ("function", "good", "change", "message"),
    [
        (reference.hyper_collapse, COLLAPSE, {"streams": torch.zeros(3, 4, 6).double()}, "streams: dtype must be"),
        (reference.hyper_collapse, COLLAPSE, {"streams": [1]}, r"streams: must be a .*Tensor, got list"),
        (
            reference.hyper_collapse,
            COLLAPSE,
            {"streams": torch.zeros(3, 24)},
            r"streams: shape must be \[T, n, D\], got \[3, 24",
        ),
        (
            reference.hyper_collapse,
            COLLAPSE,
            {"streams": torch.zeros(3, 4, 0)},
            "streams: must have at least one stream and",
        ),
        (
            reference.hyper_collapse,
            COLLAPSE,
            {"mix": torch.zeros(3, 23)},
            r"mix: shape must be \[3, 24\], got \[3, 23\]",
        ),
        (
            reference.hyper_collapse,
            COLLAPSE,
            {"mix": torch.zeros(3, 24).bfloat16()},
            "mix: dtype must be float32, got bfloat16",
        ),
        (reference.hyper_collapse, COLLAPSE, {"base": torch.zeros(20)}, r"base: shape must be \[24\]"),
        (reference.hyper_collapse, COLLAPSE, {"scale": torch.zeros(1)}, r"scale: shape must be \[3\]"),
        (reference.hyper_collapse, COLLAPSE, {"iterations": 0}, "iterations: must be at least 1, got 0"),
        (reference.hyper_collapse, COLLAPSE, {"iterations": 2.0}, "iterations: must be an int, got float"),
        (reference.hyper_collapse, COLLAPSE, {"iterations": True}, "iterations: must be an int, got bool"),
        (
            reference.hyper_expand,
            EXPAND,
            {"y": torch.zeros(3, 6).bfloat16()},
            "streams: dtype must be y's bfloat16, got float32",
        ),
        (
            reference.hyper_expand,
            EXPAND,
            {"y": torch.zeros(2, 6)},
            r"streams: shape must be \[2, n, 6\], got \[3, 4, 6\] \(sizes",
        ),
        (reference.hyper_expand, EXPAND, {"post": torch.zeros(3, 3)}, r"post: shape must be \[3, 4\]"),
        (reference.hyper_expand, EXPAND, {"comb": torch.zeros(3, 4, 3)}, r"comb: shape must be \[3, 4, 4\]"),
        (reference.hyper_expand, EXPAND, {"comb": None}, r"comb: must be a .*Tensor, got NoneType"),
        (reference.hyper_head, HEAD, {"mix": torch.zeros(3, 24)}, r"mix: shape must be \[3, 4\], got \[3, 24\]"),
        (reference.hyper_head, HEAD, {"scale": torch.zeros(3)}, r"scale: shape must be \[1\]"),
    ],
)
def test_wrong_arguments_are_named(function, good, change, message):
    assert_refused(message, function, **good | change)
