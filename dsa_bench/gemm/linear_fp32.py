"""Products of few tokens in fp32, beside PyTorch's product and a scale, over fresh matrices.

Calls stand one behind the other, and a call of ours asks for its matrix while the one before ends: behind another
kernel, as in a model, it gains less.
"""

from functools import partial

import torch

import dsa
from dsa_bench.harness.case import Case

# Rows and channels of matrices: V4-Flash's index weights, compressors of the indexer, of layers without one and with
# one, and all that a layer with an indexer has; V3.2's index weights.
MATRICES = [(64, 4096), (512, 4096), (1024, 4096), (2048, 4096), (2624, 4096), (64, 7168)]
SHAPES = [(tokens, *matrix) for matrix in MATRICES for tokens in (1, 8, 16, 32, 64)]
_FRESH_BYTES = 200e6  # of matrices in a graph: more than the L2 cache holds
_SCALE = 0.3


def case(tokens: int, rows: int, channels: int) -> Case:
    x, size = torch.randn(tokens, channels, device="cuda").bfloat16(), 2 * rows * channels
    weights = [(torch.randn(rows, channels, device="cuda") / 40).bfloat16() for _ in range(int(_FRESH_BYTES / size))]

    def product(weight: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, weight.T, out_dtype=torch.float32)

    def check(y: torch.Tensor) -> None:
        torch.testing.assert_close(y, product(weights[0]) * _SCALE, rtol=1e-4, atol=1e-4)

    calls = {
        "dsa": [partial(dsa.linear_fp32, x, weight, _SCALE) for weight in weights],
        "product, scale": [partial(lambda weight: product(weight) * _SCALE, weight) for weight in weights],
        "product": [partial(product, weight) for weight in weights],
    }

    def figure(ms: float) -> str:
        return f"{ms * 1e3:.1f} us, {size / (ms * 1e-3) / 1e9:.0f} GB/s"

    name = f"{tokens} tokens x {channels}, {rows} rows"
    baselines, yardsticks = frozenset({"product, scale"}), frozenset({"product"})
    return Case(name, calls, figure, check, graph=True, baselines=baselines, yardsticks=yardsticks)
