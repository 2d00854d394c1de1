"""The norm with a cast: bytes a second and the share of the copy bandwidth, beside the sum, the norm and the cast one
after the other."""

from functools import cache, partial

import torch

import dsa
from dsa.testing import copy_bandwidth
from dsa_bench.harness.case import Case

# tokens, channels, of a sum: V3.2's hidden state, its query latent, V4-Flash's hidden state
SHAPES = [
    (16384, 7168, True),
    (4096, 7168, True),
    (4096, 7168, False),
    (4096, 4096, False),
    (4096, 1536, False),
    (128, 7168, True),
    (1, 7168, True),
    (1, 7168, False),
]
EPS = 1e-6
_FRESH_BYTES = 400e6  # of inputs in a graph: more than the L2 cache holds
_ceiling = cache(copy_bandwidth)


def _apart(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    total = residual + x
    y = dsa.rms_norm(total, weight, EPS)
    return (total, y, *dsa.per_token_cast_to_fp8(y))


def _norm_apart(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = dsa.rms_norm(x, weight, EPS)
    return (y, *dsa.per_token_cast_to_fp8(y))


def case(tokens: int, channels: int, summed: bool) -> Case:
    size = tokens * channels * (2 * (4 if summed else 2) + 1 + 4 / 128) + 4 * channels
    inputs = [
        (
            *(torch.randn(tokens, channels, device="cuda").bfloat16() for _ in range(2 if summed else 1)),
            torch.randn(channels, device="cuda"),
        )
        for _ in range(min(64, max(2, int(_FRESH_BYTES / size))))
    ]

    def figure(ms: float) -> str:
        rate = size / (ms * 1e-3)
        return f"{ms * 1e3:.1f} us, {rate / 1e9:.0f} GB/s, {rate / _ceiling():.0%} of copy"

    def check(got: tuple[torch.Tensor, ...]) -> None:
        expected = (_apart if summed else _norm_apart)(*inputs[0])
        assert all(torch.equal(g.view(torch.uint8), e.view(torch.uint8)) for g, e in zip(got, expected, strict=True))

    fused = dsa.add_rms_norm_cast_to_fp8 if summed else dsa.rms_norm_cast_to_fp8
    calls = {
        "dsa": [partial(fused, *i, EPS) for i in inputs],
        "apart": [partial(_apart if summed else _norm_apart, *i) for i in inputs],
    }
    name = f"{tokens} x {channels} bf16, {'sum, ' if summed else ''}ue8m0"
    return Case(name, calls, figure, check, graph=True, yardsticks=frozenset({"apart"}))
