"""The projection of the streams, against DeepGEMM's in TF32 and against one cuBLAS product with the parts of the
matrix, which are then added.

DeepGEMM's rounds each weight to 11 bits, leaves partial sums of the channels to the next kernel, and sums the streams'
squares, which our collapse does.
"""

from functools import cache, partial

import torch

import dsa
from dsa.testing import copy_bandwidth
from dsa_bench.harness import agreement
from dsa_bench.harness.case import Case
from dsa_bench.peers import hyper_connections as peers

# tokens, channels of a stream
SHAPES = [(tokens, d) for d in (4096, 7168) for tokens in (16384, 8192, 2048, 512, 128, 16, 1)]
PROBED = [(128, 4096)]
OUTPUTS = 24  # of four streams
_FRESH_BYTES = 400e6  # of inputs in a graph: more than the L2 cache holds
_ceiling = cache(copy_bandwidth)


def product(streams: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
    whole = torch.mm(streams.flatten(1), parts.flatten(0, 1).T, out_dtype=torch.float32)
    return whole.unflatten(1, (3, -1)).sum(1)


def matrix(parts: torch.Tensor) -> torch.Tensor:
    """The fp32 matrix [C, n D] whose bf16 parts these are."""
    return parts.float().sum(0)


def _agree(theirs: torch.Tensor | tuple[torch.Tensor, torch.Tensor], ours: torch.Tensor) -> None:
    """A peer's result may be partial sums, and those of the squares."""
    agreement.agree(theirs[0].sum(0) if isinstance(theirs, tuple) else theirs, ours)


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
    found = peers.project((streams, matrix(parts)) for streams, parts in inputs)

    def figure(ms: float) -> str:
        rate = size / (ms * 1e-3)
        return f"{ms * 1e3:.1f} us, {rate / 1e9:.0f} GB/s, {rate / _ceiling():.0%} of copy"

    calls = {"dsa": [partial(dsa.hyper_mix, *i) for i in inputs], "torch": [partial(product, *i) for i in inputs]}
    options = {"baselines": frozenset({"torch"}), "failed": found.failed, "agree": _agree}
    return Case(f"{tokens} tokens, D {d}, bf16", calls | found.calls, figure, graph=True, **options)
