"""The collapse of the hyper-connections' streams with norm and cast in one kernel, compared with two of our kernels:
the collapse, and the norm with a cast."""

import torch

import dsa
from dsa_bench.harness.case import Case, bf16, bytes_case, f32

# tokens, channels of a stream
SHAPES = [(tokens, d) for d in (4096, 7168) for tokens in (4096, 128, 32, 8, 1)]


def _apart(*arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
    *first, weight = arguments
    x, *weights = dsa.hyper_collapse(*first)
    return *dsa.rms_norm_cast_to_fp8(x, weight), *weights


def case(tokens: int, d: int) -> Case:

    return bytes_case(
        f"{tokens} tokens, D {d}",
        tokens * (2 * 5 * d + d + 4 * d // 128 + 4 * (24 + 20)) + 4 * d,
        lambda: (bf16(tokens, 4, d), f32(tokens, 24), f32(24), f32(3), f32(d)),
        {"dsa": dsa.hyper_collapse_norm_cast_to_fp8, "apart": _apart},
        yardsticks={"apart"},
    )
