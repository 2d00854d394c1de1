"""The streams' projection beside one product with the parts of the matrix in cuBLAS, whose parts are then added."""

from functools import cache, partial

import torch

import dsa
from dsa.testing import copy_bandwidth
from dsa_bench.harness.case import Case

# tokens, channels of a stream
SHAPES = [(tokens, d) for d in (4096, 7168) for tokens in (16384, 8192, 2048, 512, 128, 16, 1)]
OUTPUTS = 24
_FRESH_BYTES = 400e6  # of inputs in a graph: more than the L2 cache holds
_ceiling = cache(copy_bandwidth)


def _product(streams: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
    whole = torch.mm(streams.flatten(1), parts.flatten(0, 1).T, out_dtype=torch.float32)
    return whole.unflatten(1, (3, -1)).sum(1)


def case(tokens: int, d: int) -> Case:
    size = 2 * 4 * d * (tokens + 3 * OUTPUTS) + 4 * tokens * OUTPUTS
    count = min(64, max(2, int(_FRESH_BYTES / size)))
    inputs = [
        (
            torch.randn(tokens, 4, d, device="cuda", dtype=torch.bfloat16),
            torch.randn(3, OUTPUTS, 4 * d, device="cuda", dtype=torch.bfloat16),
        )
        for _ in range(count)
    ]

    def figure(ms: float) -> str:
        rate = size / (ms * 1e-3)
        return f"{ms * 1e3:.1f} us, {rate / 1e9:.0f} GB/s, {rate / _ceiling():.0%} of copy"

    calls = {"dsa": [partial(dsa.hyper_mix, *i) for i in inputs], "torch": [partial(_product, *i) for i in inputs]}
    return Case(f"{tokens} tokens, D {d}, bf16", calls, figure, graph=True, baselines=frozenset({"torch"}))
