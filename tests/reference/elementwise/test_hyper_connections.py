"""The hyper-connections' reference against the definition, number by number."""

import math

import pytest
import torch

from dsa import reference

EPS, HC_EPS = 1e-3, 1e-2  # large, so that leaving one out shows


def inputs(tokens=3, n=4, d=6, dtype=torch.float32):
    count = (2 + n) * n
    streams, y = torch.randn(tokens, n, d).to(dtype), torch.randn(tokens, d).to(dtype)
    return streams, y, torch.randn(tokens, count), torch.randn(count), torch.randn(3)


def by_hand(streams, mix, base, scale, iterations):
    """x, post, comb of one token."""
    n, d = streams.shape
    root = math.sqrt(sum(v * v for v in streams.flatten().tolist()) / (n * d) + EPS)
    kinds = [0] * n + [1] * n + [2] * n * n
    z = [m / root * scale[k].item() + b for m, b, k in zip(mix.tolist(), base.tolist(), kinds)]
    pre = [1 / (1 + math.exp(-v)) + HC_EPS for v in z[:n]]
    post = [2 / (1 + math.exp(-v)) for v in z[n : 2 * n]]
    comb = [[math.exp(v) for v in z[2 * n + i * n : 2 * n + i * n + n]] for i in range(n)]
    comb = [[v / sum(row) + HC_EPS for v in row] for row in comb]
    for step in range(2 * iterations - 1):
        if step % 2:
            comb = [[v / (sum(row) + HC_EPS) for v in row] for row in comb]
        else:
            sums = [sum(row[j] for row in comb) + HC_EPS for j in range(n)]
            comb = [[v / sums[j] for j, v in enumerate(row)] for row in comb]
    x = [sum(pre[k] * streams[k, c].item() for k in range(n)) for c in range(d)]
    return torch.tensor(x), torch.tensor(post), torch.tensor(comb)


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_collapse(n, iterations):
    streams, _, mix, base, scale = inputs(n=n)
    got = reference.hyper_collapse(streams, mix, base, scale, iterations=iterations, eps=EPS, hc_eps=HC_EPS)
    expected = [by_hand(*row, base, scale, iterations) for row in zip(streams, mix)]
    for ours, theirs in zip(got, zip(*expected)):
        torch.testing.assert_close(ours, torch.stack(theirs))


@pytest.mark.parametrize("n", [1, 2, 4])
def test_expand(n):
    streams, y, *_ = inputs(n=n)
    post, comb = torch.randn(3, n), torch.randn(3, n, n)
    got = reference.hyper_expand(y, streams, post, comb)
    for t in range(3):
        for k in range(n):
            expected = post[t, k] * y[t] + sum(comb[t, j, k] * streams[t, j] for j in range(n))
            torch.testing.assert_close(got[t, k], expected)


def test_sinkhorn_makes_comb_doubly_stochastic():
    torch.manual_seed(0)  # some matrices need thousands of iterations
    streams, _, mix, base, scale = inputs(tokens=50)
    _, _, comb = reference.hyper_collapse(streams, mix, base, scale, iterations=200)
    torch.testing.assert_close(comb.sum(1), torch.ones(50, 4), atol=1e-4, rtol=0)
    torch.testing.assert_close(comb.sum(2), torch.ones(50, 4), atol=1e-4, rtol=0)


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


def test_no_tokens():
    streams, y, mix, base, scale = inputs(tokens=0)
    x, post, comb = reference.hyper_collapse(streams, mix, base, scale)
    assert x.shape == (0, 6) and post.shape == (0, 4) and comb.shape == (0, 4, 4)
    assert reference.hyper_expand(y, streams, post, comb).shape == (0, 4, 6)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, torch.randn(3, 4, 6).double(), "streams: dtype must be"),
        (0, torch.randn(3, 24), r"streams: shape must be \[T, n, D\], got \[3, 24\]"),
        (0, torch.randn(3, 4, 0), "streams: must have at least one stream and one channel"),
        (1, torch.randn(3, 23), r"mix: shape must be \[3, 24\], got \[3, 23\]"),
        (1, torch.randn(3, 24).bfloat16(), "mix: dtype must be float32, got bfloat16"),
        (2, torch.randn(20), r"base: shape must be \[24\]"),
        (3, torch.randn(1), r"scale: shape must be \[3\]"),
    ],
)
def test_errors_of_collapse(at, value, message):
    streams, _, mix, base, scale = inputs()
    arguments = [streams, mix, base, scale]
    arguments[at] = value
    with pytest.raises(ValueError, match=message):
        reference.hyper_collapse(*arguments)


@pytest.mark.parametrize(("iterations", "error"), [(0, ValueError), (2.0, TypeError), (True, TypeError)])
def test_errors_of_iterations(iterations, error):
    streams, _, mix, base, scale = inputs()
    with pytest.raises(error, match="iterations: must be"):
        reference.hyper_collapse(streams, mix, base, scale, iterations=iterations)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, torch.randn(3, 6).bfloat16(), "streams: dtype must be y's bfloat16, got float32"),
        (0, torch.randn(2, 6), r"streams: shape must be \[2, n, 6\], got \[3, 4, 6\] \(sizes as of y\)"),
        (2, torch.randn(3, 3), r"post: shape must be \[3, 4\]"),
        (3, torch.randn(3, 4, 3), r"comb: shape must be \[3, 4, 4\]"),
    ],
)
def test_errors_of_expand(at, value, message):
    streams, y, *_ = inputs()
    arguments = [y, streams, torch.randn(3, 4), torch.randn(3, 4, 4)]
    arguments[at] = value
    with pytest.raises(ValueError, match=message):
        reference.hyper_expand(*arguments)


def test_errors_of_types():
    streams, y, mix, base, scale = inputs()
    with pytest.raises(TypeError, match=r"streams: must be a .*Tensor, got list"):
        reference.hyper_collapse([1], mix, base, scale)
    with pytest.raises(TypeError, match=r"comb: must be a .*Tensor, got NoneType"):
        reference.hyper_expand(y, streams, torch.randn(3, 4), None)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_head_is_the_stream_that_goes_into_a_sublayer(n):
    streams, _, mix, base, scale = inputs(n=n)
    got = reference.hyper_head(streams, mix[:, :n], base[:n], scale[:1], eps=EPS, hc_eps=HC_EPS)
    torch.testing.assert_close(got, torch.stack([by_hand(*row, base, scale, 1)[0] for row in zip(streams, mix)]))


def test_errors_of_head():
    streams, _, mix, base, scale = inputs()
    with pytest.raises(ValueError, match=r"mix: shape must be \[3, 4\], got \[3, 24\]"):
        reference.hyper_head(streams, mix, base[:4], scale[:1])
    with pytest.raises(ValueError, match=r"scale: shape must be \[1\]"):
        reference.hyper_head(streams, mix[:, :4], base[:4], scale)
