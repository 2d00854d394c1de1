"""Attention's results rotated back and cast to FP8 for the next product, in one kernel, compared with our separate
rotation and cast."""

from functools import partial

import torch

import dsa
from dsa_bench.harness.case import Case, Scaled, angles, bf16, bytes_case

# tokens, heads, groups of heads: V4-Flash (64 heads) and V4-Pro (128 heads), in prefill and in decoding
SHAPES = [(4096, 64, 8), (4096, 128, 16), (128, 64, 8), (1, 64, 8), (1, 128, 16)]
SEPARATE = "rotary and cast"
_DIM, _ROTATED = 512, 64


def case(tokens: int, heads: int, groups: int) -> Case:
    places = torch.arange(tokens * groups, dtype=torch.int32, device="cuda").view(groups, tokens).T.reshape(-1, 1)

    def separately(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Scaled:
        rotated = dsa.apply_rotary(x, cos, sin, interleaved=True, dims="last")
        return dsa.scatter_cast_to_fp8(rotated.view(tokens * groups, -1), places)

    return bytes_case(
        f"{tokens} x {heads} x {_DIM} bf16, {groups} groups",
        tokens * heads * _DIM * (2 + 1 + 4 / 128),
        lambda: (bf16(tokens, heads, _DIM), *angles(tokens, _ROTATED)),
        {"dsa": partial(dsa.rotary_cast_to_fp8, groups=groups), SEPARATE: separately},
        yardsticks={SEPARATE},
    )
