"""The streams' collapse with norm and cast, beside the two kernels one after the other."""

from functools import cache, partial

import torch

import dsa
from dsa.testing import copy_bandwidth
from dsa_bench.harness.case import Case

# tokens, channels of a stream
SHAPES = [(tokens, d) for d in (4096, 7168) for tokens in (4096, 128, 32, 8, 1)]
_FRESH_BYTES = 400e6  # of inputs in a graph: more than the L2 cache holds
_ceiling = cache(copy_bandwidth)


def _apart(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
    *first, weight = given
    x, *weights = dsa.hyper_collapse(*first)
    return *dsa.rms_norm_cast_to_fp8(x, weight), *weights


def case(tokens: int, d: int) -> Case:
    size = tokens * (2 * 5 * d + d + 4 * d // 128 + 4 * (24 + 20)) + 4 * d
    inputs = [
        (
            torch.randn(tokens, 4, d, device="cuda").bfloat16(),
            *(torch.randn(*s, device="cuda") for s in ((tokens, 24), (24,), (3,), (d,))),
        )
        for _ in range(min(64, max(2, int(_FRESH_BYTES / size))))
    ]

    def figure(ms: float) -> str:
        rate = size / (ms * 1e-3)
        return f"{ms * 1e3:.1f} us, {rate / 1e9:.0f} GB/s, {rate / _ceiling():.0%} of copy"

    def check(got: tuple[torch.Tensor, ...]) -> None:
        expected = _apart(*inputs[0])
        assert all(torch.equal(g.view(torch.uint8), e.view(torch.uint8)) for g, e in zip(got, expected, strict=True))

    calls = {
        "dsa": [partial(dsa.hyper_collapse_norm_cast_to_fp8, *i) for i in inputs],
        "apart": [partial(_apart, *i) for i in inputs],
    }
    return Case(f"{tokens} tokens, D {d}", calls, figure, check, graph=True, yardsticks=frozenset({"apart"}))
