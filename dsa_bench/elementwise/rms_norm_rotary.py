"""V4's norm of query heads with rope behind it: bytes a second, beside the norm and the rotation by themselves."""

from functools import cache, partial

import torch

import dsa
from dsa.testing import copy_bandwidth
from dsa_bench.harness.case import Case

# tokens, heads: V4-Flash's and V4-Pro's, prefill and decoding
SHAPES = [(4096, 64), (4096, 128), (128, 64), (1, 64), (1, 128)]
SEPARATE = "norm and rotary"
_DIM, _ROTATED = 512, 64
_FRESH_BYTES = 400e6  # of inputs in a graph: more than the L2 cache holds
_ceiling = cache(copy_bandwidth)


def _separately(x: torch.Tensor, weight: None, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    y = dsa.rms_norm(x, weight)
    return dsa.apply_rotary(y, cos, sin, interleaved=True, dims="last", out=y)


def case(tokens: int, heads: int) -> Case:
    size = 2 * 2 * tokens * heads * _DIM + 2 * 4 * tokens * _ROTATED // 2
    inputs = []
    for _ in range(min(64, max(2, int(_FRESH_BYTES / size)))):
        angles = torch.randn(tokens, _ROTATED // 2, device="cuda")
        x = torch.randn(tokens, heads, _DIM, device="cuda").bfloat16()
        inputs.append((x, None, angles.cos(), angles.sin()))

    def figure(ms: float) -> str:
        rate = size / (ms * 1e-3)
        return f"{ms * 1e3:.1f} us, {rate / 1e9:.0f} GB/s, {rate / _ceiling():.0%} of copy"

    def check(got: torch.Tensor) -> None:
        if not torch.equal(got, _separately(*inputs[0])):
            raise AssertionError("not the bits of the norm and the rotation")

    calls = {
        "dsa": [partial(dsa.rms_norm_rotary, *i) for i in inputs],
        SEPARATE: [partial(_separately, *i) for i in inputs],
    }
    name = f"{tokens} x {heads} x {_DIM} bf16"
    return Case(name, calls, figure, check, graph=True, yardsticks=frozenset({SEPARATE}))
