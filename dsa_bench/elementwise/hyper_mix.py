"""The projection of the hyper-connections' streams, compared with DeepGEMM's projection in TF32 and with cuBLAS. One
cuBLAS product multiplies the streams by all three bf16 parts of the matrix, and its three results are then added.

DeepGEMM rounds each weight to 11 bits and leaves partial sums over the channels to the next kernel. It also sums the
squares of the streams; with our ops the collapse sums them.
"""

import torch

import dsa
from dsa_bench.harness.case import Case, agree, bf16, bytes_case
from dsa_bench.peers import hyper_connections as peers

# tokens, channels of a stream
SHAPES = [(tokens, d) for d in (4096, 7168) for tokens in (16384, 8192, 2048, 512, 128, 16, 1)]
PROBED = [(128, 4096)]
OUTPUTS = 24  # with n = 4 streams: n (n + 2)
Inputs = tuple[torch.Tensor, torch.Tensor]


def product(streams: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
    whole = torch.mm(streams.flatten(1), parts.flatten(0, 1).T, out_dtype=torch.float32)
    return whole.unflatten(1, (3, -1)).sum(1)


def matrix(parts: torch.Tensor) -> torch.Tensor:
    """Return the fp32 matrix [OUTPUTS, 4 D], the sum of the bf16 parts [3, OUTPUTS, 4 D]."""
    return parts.float().sum(0)


def case(tokens: int, d: int) -> Case:
    def inputs() -> Inputs:
        return bf16(tokens, 4, d), bf16(3, OUTPUTS, 4 * d)

    return bytes_case(
        f"{tokens} tokens, D {d}, bf16",
        2 * 4 * d * (tokens + 3 * OUTPUTS) + 4 * tokens * OUTPUTS,
        inputs,
        {"dsa": dsa.hyper_mix, "torch": product},
        lambda inputs: peers.project((x, matrix(parts)) for x, parts in inputs),
        baselines={"torch"},
        # DeepGEMM's result is (partial sums of the product, partial sums of the squares).
        agree=lambda theirs, ours: agree(theirs[0].sum(0) if isinstance(theirs, tuple) else theirs, ours),
    )
