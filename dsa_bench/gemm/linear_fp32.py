"""Products of few tokens in fp32, compared with PyTorch's product and a scale, over fresh matrices.

Calls follow one another, and each of ours prefetches its matrix while the call before ends: after another kernel, as in
a model, it gains less.
"""

from functools import partial

import torch

import dsa
from dsa_bench.harness.calls import over
from dsa_bench.harness.case import Case, fresh_matrices, plain_rate

# Rows and channels of matrices: V4-Flash's index weights, compressors of the indexer, of layers without one and with
# one, and all that a layer with an indexer has; V3.2's index weights.
MATRICES = [(64, 4096), (512, 4096), (1024, 4096), (2048, 4096), (2624, 4096), (64, 7168)]
SHAPES = [(tokens, *matrix) for matrix in MATRICES for tokens in (1, 8, 16, 32, 64)]
_SCALE = 0.3


def case(tokens: int, rows: int, channels: int) -> Case:
    x = torch.randn(tokens, channels, device="cuda").bfloat16()

    def product(weight: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, weight.T, out_dtype=torch.float32)

    calls = over(
        fresh_matrices(rows, channels),
        {
            "dsa": partial(dsa.linear_fp32, x, scale=_SCALE),
            "product, scale": lambda weight: product(weight) * _SCALE,
            "product": product,
        },
    )
    kinds = {"baselines": frozenset({"product, scale"}), "yardsticks": frozenset({"product"})}
    name = f"{tokens} tokens x {channels}, {rows} rows"
    return Case(name, calls, plain_rate(2 * rows * channels), graph=True, **kinds)
