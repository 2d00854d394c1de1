"""The collapse of the hyper-connections' streams with norm and cast in one kernel, compared with two of our kernels:
the collapse, and the norm with a cast."""

import torch

import dsa
from dsa_bench.harness.case import Case, bf16, bytes_case, f32

# tokens, channels of a stream, and True for independent streams
SHAPES = [(tokens, d) for d in (4096, 7168) for tokens in (4096, 128, 32, 8, 1)]
SHAPES += [(tokens, 2816, True) for tokens in (4096, 128, 1)]


def _apart(*arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
    *first, weight = arguments
    x, *weights = dsa.hyper_collapse(*first)
    return *dsa.rms_norm_cast_to_fp8(x, weight), *weights


def _independent_apart(*arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
    *first, weight = arguments
    x, post = dsa.hyper_collapse_independent(*first)
    return *dsa.rms_norm_cast_to_fp8(x, weight), post


def case(tokens: int, d: int, independent: bool = False) -> Case:
    count, parts, results = (8, 2, 4) if independent else (24, 3, 20)
    mixed = {"dsa": dsa.hyper_collapse_norm_cast_to_fp8, "apart": _apart}
    return bytes_case(
        f"{tokens} tokens, D {d}{', independent' if independent else ''}",
        tokens * (2 * 5 * d + d + 4 * d // 128 + 4 * (count + results)) + 4 * d,
        lambda: (bf16(tokens, 4, d), f32(tokens, count), f32(count), f32(parts), f32(d)),
        {"dsa": dsa.hyper_collapse_independent_norm_cast_to_fp8, "apart": _independent_apart} if independent else mixed,
        yardsticks={"apart"},
    )
