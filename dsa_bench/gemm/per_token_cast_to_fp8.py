"""The FP8 cast: bytes a second against the copy bandwidth of the same run, beside vLLM's and SGLang's."""

from functools import cache, partial

import torch

import dsa
from dsa.testing import copy_bandwidth
from dsa_bench.harness.case import Call, Case
from dsa_bench.peers import operators
from dsa_bench.peers.package import Peers

# tokens, channels, Hadamard, power-of-two scales: activations of V3.2's linears, a prefill chunk's index queries,
# decode batches
SHAPES = [
    (*shape, use_ue8m0)
    for shape in (
        (65536, 7168, False),
        (8192, 7168, False),
        (4096, 18432, False),
        (128, 7168, False),
        (65536, 7168, True),
        (4096 * 64, 128, True),
        (128 * 64, 128, True),
    )
    for use_ue8m0 in (True, False)
]
PROBED = [(128, 7168, False, True), (128, 7168, False, False)]
_FRESH_BYTES = 400e6  # of inputs in a graph: more than the L2 cache holds
_ceiling = cache(copy_bandwidth)


def case(tokens: int, channels: int, hadamard: bool, use_ue8m0: bool) -> Case:
    size = tokens * channels * (2 + 1 + 4 / 128)
    inputs = 1 if size > _FRESH_BYTES else min(64, max(2, int(_FRESH_BYTES / size)))
    xs = [torch.randn(tokens, channels, device="cuda").bfloat16() for _ in range(inputs)]
    peers = Peers() if hadamard else operators.cast([(x, use_ue8m0) for x in xs])
    calls: dict[str, list[Call]] = {
        "dsa": [partial(dsa.per_token_cast_to_fp8, x, use_ue8m0, hadamard=hadamard) for x in xs],
        **peers.calls,
    }

    def figure(ms: float) -> str:
        rate = size / (ms * 1e-3)
        return f"{rate / 1e9:.0f} GB/s, {rate / _ceiling():.0%} of copy"

    scales = "ue8m0" if use_ue8m0 else "fp32"
    name = f"{tokens} x {channels} bf16, {scales}{', Hadamard' if hadamard else ''}"
    return Case(name, calls, figure, graph=len(xs) > 1, failed=peers.failed)
