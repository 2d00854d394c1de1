"""The projection of the streams, compared with DeepGEMM's in TF32 and with one cuBLAS product with the parts of the
matrix, which are then added.

DeepGEMM's rounds each weight to 11 bits, leaves partial sums of the channels to the next kernel, and sums the streams'
squares, which our collapse does.
"""

import torch

import dsa
from dsa_bench.harness import agreement
from dsa_bench.harness.calls import over
from dsa_bench.harness.case import Case, bytes_rate, fresh
from dsa_bench.peers import hyper_connections as peers

# tokens, channels of a stream
SHAPES = [(tokens, d) for d in (4096, 7168) for tokens in (16384, 8192, 2048, 512, 128, 16, 1)]
PROBED = [(128, 4096)]
OUTPUTS = 24  # of four streams


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
    def one() -> tuple[torch.Tensor, torch.Tensor]:
        streams = torch.randn(tokens, 4, d, device="cuda", dtype=torch.bfloat16)
        return streams, torch.randn(3, OUTPUTS, 4 * d, device="cuda", dtype=torch.bfloat16)

    size = 2 * 4 * d * (tokens + 3 * OUTPUTS) + 4 * tokens * OUTPUTS
    inputs = fresh(size, one)
    found = peers.project((streams, matrix(parts)) for streams, parts in inputs)
    calls = over(inputs, {"dsa": dsa.hyper_mix, "torch": product})
    options = {"graph": True, "baselines": frozenset({"torch"}), "agree": _agree}
    return Case(f"{tokens} tokens, D {d}, bf16", calls, bytes_rate(size), found, **options)
