"""The references of the hyper-connections: numbers of streams, rounding, gradients and wrong arguments."""

import pytest
import torch

from dsa import reference
from dsa.cases import cases_of
from tests.reference.common import assert_refused

CASES = COLLAPSE, EXPAND, HEAD = cases_of("hyper_connections")


@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_against_float64(iterations, n, tokens):
    """The two eps are large: leaving one out shows."""
    eps = {"eps": 1e-3, "hc_eps": 1e-2}
    COLLAPSE.verify(tokens=tokens, n=n, dtype=torch.float32, iterations=iterations, **eps)
    HEAD.verify(tokens=tokens, n=n, dtype=torch.float32, **eps)
    EXPAND.verify(tokens=tokens, n=n, dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_rounded_once(case, dtype):
    given = case.arguments(dtype=dtype)
    floats = {name: x.float() if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    for got, exact in zip(case.run(given), case.run(floats), strict=True):
        assert torch.equal(got, exact.to(got.dtype))


def test_gradients():
    given = {name: x.requires_grad_() for name, x in EXPAND.arguments(dtype=torch.float32).items()}
    a = COLLAPSE.arguments(dtype=torch.float32)
    coefficients = [a[name].requires_grad_() for name in ("mix", "base", "scale")]
    x, post, comb = reference.hyper_collapse(given["streams"], *coefficients)
    new = reference.hyper_expand(given["y"], given["streams"], post, comb)
    (new.square().sum() + x.square().sum()).backward()
    for tensor in (given["streams"], given["y"], *coefficients):
        assert tensor.grad.isfinite().all() and tensor.grad.any()


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        (COLLAPSE, {"streams": torch.zeros(3, 4, 16).double()}, "streams: dtype must be"),
        (COLLAPSE, {"streams": [1]}, r"streams: must be a .*Tensor, got list"),
        (COLLAPSE, {"streams": torch.zeros(3, 24)}, r"streams: shape must be \[T, n, D\], got \[3, 24"),
        (COLLAPSE, {"streams": torch.zeros(3, 4, 0)}, "streams: D must be at least 1, got 0"),
        (COLLAPSE, {"mix": torch.zeros(3, 23)}, r"mix: shape must be \[3, 24\], got \[3, 23\]"),
        (COLLAPSE, {"mix": torch.zeros(3, 24).bfloat16()}, "mix: dtype must be float32, got bfloat16"),
        (COLLAPSE, {"base": torch.zeros(20)}, r"base: shape must be \[24\]"),
        (COLLAPSE, {"scale": torch.zeros(1)}, r"scale: shape must be \[3\]"),
        (COLLAPSE, {"iterations": 0}, "iterations: must be at least 1, got 0"),
        (COLLAPSE, {"iterations": 2.0}, "iterations: must be an int, got float"),
        (COLLAPSE, {"iterations": True}, "iterations: must be an int, got bool"),
        (EXPAND, {"y": torch.zeros(3, 16).half()}, "streams: dtype must be y's float16, got bfloat16"),
        (
            EXPAND,
            {"y": torch.zeros(2, 16).bfloat16()},
            r"streams: shape must be \[2, n, 16\], got \[3, 4, 16\] \(sizes",
        ),
        (EXPAND, {"post": torch.zeros(3, 3)}, r"post: shape must be \[3, 4\]"),
        (EXPAND, {"comb": torch.zeros(3, 4, 3)}, r"comb: shape must be \[3, 4, 4\]"),
        (EXPAND, {"comb": None}, r"comb: must be a .*Tensor, got NoneType"),
        (HEAD, {"mix": torch.zeros(3, 24)}, r"mix: shape must be \[3, 4\], got \[3, 24\]"),
        (HEAD, {"scale": torch.zeros(3)}, r"scale: shape must be \[1\]"),
    ],
)
def test_wrong_arguments_are_named(case, change, message):
    assert_refused(message, case.function(), **case.arguments() | change)
