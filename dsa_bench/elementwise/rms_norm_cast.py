"""The RMS norm with an FP8 cast, with or without the sum of x and a residual before it, in one kernel: bytes per second
and their share of the copy bandwidth, compared with torch's sum followed by our separate norm and cast."""

from functools import partial

import torch

import dsa
from dsa_bench.harness.case import Case, bf16, bytes_case, f32

# tokens, channels, whether a residual is added: V3.2's hidden state (7168) and query latent (1536), V4-Flash's hidden
# state (4096)
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


def _norm_apart(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = dsa.rms_norm(x, weight, EPS)
    return y, *dsa.per_token_cast_to_fp8(y)


def _sum_apart(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    total = residual + x
    return total, *_norm_apart(total, weight)


def case(tokens: int, channels: int, summed: bool) -> Case:

    fused = dsa.add_rms_norm_cast_to_fp8 if summed else dsa.rms_norm_cast_to_fp8
    return bytes_case(
        f"{tokens} x {channels} bf16, {'sum, ' if summed else ''}ue8m0",
        tokens * channels * (2 * (4 if summed else 2) + 1 + 4 / 128) + 4 * channels,
        lambda: (*(bf16(tokens, channels) for _ in range(2 if summed else 1)), f32(channels)),
        {"dsa": partial(fused, eps=EPS), "apart": _sum_apart if summed else _norm_apart},
        yardsticks={"apart"},
    )
