"""Products of few bf16 tokens with a bf16 matrix in fp32, multiplied by a scale in the same kernel. They are compared
with PyTorch's product followed by a scale. PyTorch's product alone is a yardstick. Every call of a graph reads another
matrix.

The calls run back to back, and each of ours prefetches its matrix while the previous call ends. After another kernel,
as in a model, the prefetch gains less.
"""

from functools import partial

import torch

import dsa
from dsa_bench.harness.case import Case, bf16, fresh_matrices, over, plain_rate

# Rows and channels of matrices. V4-Flash: index weights, three compressors, and the matrices of a layer with an
# indexer, joined. V3.2: index weights.
MATRICES = [(64, 4096), (512, 4096), (1024, 4096), (2048, 4096), (2624, 4096), (64, 7168)]
SHAPES = [(tokens, *matrix) for matrix in MATRICES for tokens in (1, 8, 16, 32, 64)]
_SCALE = 0.3


def case(tokens: int, rows: int, channels: int) -> Case:
    x = bf16(tokens, channels)

    def product(weight: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, weight.T, out_dtype=torch.float32)

    return Case(
        f"{tokens} tokens x {channels}, {rows} rows",
        over(
            fresh_matrices(rows, channels),
            {
                "dsa": partial(dsa.linear_fp32, x, scale=_SCALE),
                "product, scale": lambda weight: product(weight) * _SCALE,
                "product": product,
            },
        ),
        plain_rate(2 * rows * channels),
        graph=True,
        baselines={"product, scale"},
        yardsticks={"product"},
    )
