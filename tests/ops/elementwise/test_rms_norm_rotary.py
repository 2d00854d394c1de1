"""The bridge of the norm with rope, on the CPU: what it launches, gradients, torch.compile, and what it refuses."""

import pytest
import torch
from torch import library

import dsa
from dsa.ops.elementwise import rms_norm_rotary as op  # noqa: F401 -- `launches` looks at it
from dsa.reference.elementwise import rms_norm_rotary as reference


def operands(tokens=3, heads=2, dim=80, rotated=64, dtype=torch.bfloat16, weighted=True):
    angles, weight = torch.randn(tokens, rotated // 2), torch.randn(dim) if weighted else None
    return torch.randn(tokens, heads, dim).to(dtype), weight, angles.cos(), angles.sin()


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_runs_the_reference_without_a_gpu(dtype, weighted):
    given = operands(dtype=dtype, weighted=weighted)
    expected = reference.rms_norm_rotary(*given, 1e-3)
    got = dsa.rms_norm_rotary(*given, 1e-3)
    assert got.dtype == dtype and torch.equal(got, expected)
    compiled = torch.compile(dsa.rms_norm_rotary, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*given, 1e-3), expected)


def test_registration():
    library.opcheck(torch.ops.dsa.rms_norm_rotary.default, (*operands(), 1e-6))


def test_gradients_are_the_formulas(launches):
    x, weight, cos, sin = operands(dtype=torch.float32)
    inputs = [t.requires_grad_() for t in (x, weight, cos, sin)]
    share = torch.randn(3, 2, 80)
    got, expected = (
        torch.autograd.grad((function(*inputs) * share).sum(), inputs)
        for function in (dsa.rms_norm_rotary, reference.rms_norm_rotary)
    )
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert not launches
    with torch.no_grad():
        assert not dsa.rms_norm_rotary(*inputs).requires_grad
    assert len(launches) == 1


@pytest.mark.parametrize("weighted", [True, False])
def test_what_the_kernel_gets(weighted, launches):
    x, weight, cos, sin = operands(5, 4, 512, weighted=weighted)
    y = dsa.rms_norm_rotary(x, weight, cos, sin, 1e-5)
    [(variant, (rows, gain, c, s, out, eps))] = launches
    assert variant == (torch.bfloat16, weighted, 512) and gain is weight and eps == 1e-5
    assert rows is x and c is cos and s is sin and out is y and y.is_contiguous()


def test_nothing_to_norm(launches):
    for shape in ({"tokens": 0}, {"heads": 0}):
        assert not dsa.rms_norm_rotary(*operands(**shape)).numel()
    assert not launches


def test_what_the_kernel_does_not_take(launches):
    x, _, cos, sin = operands()
    wide, long = torch.zeros(3, 33)[:, :32], "x: .* a multiple of 8 up to {} for {}, got shape"
    for given, message in [
        ((x, None, cos[:, :2], sin[:, :2]), r"cos: the kernel rotates a multiple of 8 channels, got shape \[3, 2\]"),
        ((x, None, cos[:, :0], sin[:, :0]), r"cos: the kernel rotates a multiple of 8 channels, got shape \[3, 0\]"),
        ((torch.zeros(3, 1, 1032).half(), None, cos, sin), long.format(1024, "float16")),
        ((torch.zeros(3, 1, 520), None, cos, sin), long.format(512, "float32")),
        ((torch.zeros(3, 1, 76), None, cos, sin), long.format(512, "float32")),
        (
            (x[:1, :1].expand(2**20, 2**11, 80), None, *(t[:1].expand(2**20, 32) for t in (cos, sin))),
            "x: .* at most 214",
        ),
        ((torch.zeros(3, 2, 81)[..., :80], None, cos, sin), "x: rows must start at multiples of 16 bytes"),
        ((x, None, wide, sin), "cos: rows must start at multiples of 16 bytes"),
        ((x, None, cos, wide), "sin: rows must start at multiples of 16 bytes"),
    ]:
        with pytest.raises(ValueError, match=message):
            dsa.rms_norm_rotary(*given)
    assert not launches
