"""V4's norm of query heads and their rope in one kernel: bytes per second, compared with our separate norm and
rotation."""

import torch

import dsa
from dsa_bench.harness.case import Case, angles, bf16, bytes_case

# tokens, heads: V4-Flash (64 heads) and V4-Pro (128 heads), in prefill and in decoding
SHAPES = [(4096, 64), (4096, 128), (128, 64), (1, 64), (1, 128)]
SEPARATE = "norm and rotary"
_DIM, _ROTATED = 512, 64


def _separately(x: torch.Tensor, weight: None, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    y = dsa.rms_norm(x, weight)
    return dsa.apply_rotary(y, cos, sin, interleaved=True, dims="last", out=y)


def case(tokens: int, heads: int) -> Case:

    return bytes_case(
        f"{tokens} x {heads} x {_DIM} bf16",
        2 * 2 * tokens * heads * _DIM + 2 * 4 * tokens * _ROTATED // 2,
        lambda: (bf16(tokens, heads, _DIM), None, *angles(tokens, _ROTATED)),
        {"dsa": dsa.rms_norm_rotary, SEPARATE: _separately},
        yardsticks={SEPARATE},
    )
