"""Attention's results rotated back and cast for the product behind it, beside the two by themselves."""

from functools import cache, partial

import torch

import dsa
from dsa.testing import copy_bandwidth
from dsa_bench.harness.case import Call, Case

# tokens, heads, groups of heads: V4-Flash's and V4-Pro's, prefill and decoding
SHAPES = [(4096, 64, 8), (4096, 128, 16), (128, 64, 8), (1, 64, 8), (1, 128, 16)]
SEPARATE = "rotary and cast"
_DIM, _ROTATED = 512, 64
_FRESH_BYTES = 400e6  # of inputs in a graph: more than the L2 cache holds
_ceiling = cache(copy_bandwidth)


def _separately(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, places: torch.Tensor, groups: int
) -> tuple[torch.Tensor, torch.Tensor]:
    turned = dsa.apply_rotary(x, cos, sin, interleaved=True, dims="last")
    return dsa.scatter_cast_to_fp8(turned.view(len(x) * groups, -1), places)


def case(tokens: int, heads: int, groups: int) -> Case:
    size = tokens * heads * _DIM * (2 + 1 + 4 / 128)
    places = torch.arange(tokens * groups, dtype=torch.int32, device="cuda").view(groups, tokens).T.reshape(-1, 1)
    inputs = []
    for _ in range(min(64, max(2, int(_FRESH_BYTES / size)))):
        angles = torch.randn(tokens, _ROTATED // 2, device="cuda")
        inputs.append((torch.randn(tokens, heads, _DIM, device="cuda").bfloat16(), angles.cos(), angles.sin()))

    def figure(ms: float) -> str:
        rate = size / (ms * 1e-3)
        return f"{ms * 1e3:.1f} us, {rate / 1e9:.0f} GB/s, {rate / _ceiling():.0%} of copy"

    def check(got: tuple[torch.Tensor, torch.Tensor]) -> None:
        for one, expected in zip(got, _separately(*inputs[0], places, groups), strict=True):
            if not torch.equal(one.view(torch.uint8), expected.view(torch.uint8)):
                raise AssertionError("not the bytes of the rotation and the cast")

    calls: dict[str, list[Call]] = {
        "dsa": [partial(dsa.rotary_cast_to_fp8, *i, groups) for i in inputs],
        SEPARATE: [partial(_separately, *i, places, groups) for i in inputs],
    }
    name = f"{tokens} x {heads} x {_DIM} bf16, {groups} groups"
    return Case(name, calls, figure, check, graph=True, yardsticks=frozenset({SEPARATE}))
