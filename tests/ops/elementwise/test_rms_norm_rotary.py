"""The bridge of the norm with rope, on the CPU: what it launches, gradients, torch.compile, and what it refuses."""

import pytest
import torch

import dsa
from dsa.ops.elementwise import rms_norm_rotary as op  # noqa: F401 -- `launches` looks at it


def operands(tokens=3, heads=2, dim=80, rotated=64, dtype=torch.bfloat16, weighted=True):
    angles, weight = torch.randn(tokens, rotated // 2), torch.randn(dim) if weighted else None
    return torch.randn(tokens, heads, dim).to(dtype), weight, angles.cos(), angles.sin()


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
