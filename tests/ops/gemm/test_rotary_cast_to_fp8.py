"""The bridge of heads rotated and cast, on the CPU: what it launches, torch.compile, and what it refuses."""

import pytest
import torch

import dsa
from dsa.ops.gemm import rotary_cast_to_fp8 as op  # noqa: F401 -- `launches` looks at it


def operands(tokens=5, heads=6, dim=256, rotated=64):
    angles = torch.randn(tokens, rotated // 2)
    return torch.randn(tokens, heads, dim).bfloat16(), angles.cos(), angles.sin()


def test_nothing_to_cast_launches_nothing(launches):
    for shape in ({"tokens": 0}, {"heads": 0}):
        q, scale = dsa.rotary_cast_to_fp8(*operands(**shape), 2)
        assert not q.numel() and not scale.numel()
    assert not launches


def test_what_the_kernel_does_not_take(launches):
    x, cos, sin = operands()
    wide = torch.zeros(5, 33)[:, :32]
    for given, message in [
        ((x, cos[:, :3], sin[:, :3]), r"cos: the kernel rotates a multiple of 8 channels, got shape \[5, 3\]"),
        ((x, cos[:, :0], sin[:, :0]), r"cos: the kernel rotates a multiple of 8 channels, got shape \[5, 0\]"),
        ((x, wide, sin), "cos: rows must start at multiples of 16 bytes"),
        ((x, cos, wide), "sin: rows must start at multiples of 16 bytes"),
        ((torch.zeros(5, 6, 257)[..., :256], cos, sin), "x: rows must start at multiples of 16 bytes"),
        ((torch.zeros(5, 6, 512)[..., ::2], cos, sin), "x: the last dimension must be contiguous"),
    ]:
        with pytest.raises(ValueError, match=message):
            dsa.rotary_cast_to_fp8(*given, 2)
    assert not launches
