"""The FP8 cast: bytes per second and their share of the copy bandwidth. Without a Hadamard transform it is compared
with vLLM's and SGLang's casts, which have none."""

from functools import partial

import dsa
from dsa_bench.harness.case import Case, Peers, bf16, bytes_rate, fresh
from dsa_bench.peers import operators

# tokens, channels, with a Hadamard transform, power-of-two scales. Without the transform: activations of V3.2's
# linears. With it: 65536 tokens of the same size, and the index queries (64 per token) of a prefill chunk and of a
# decode batch
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


def case(tokens: int, channels: int, hadamard: bool, use_ue8m0: bool) -> Case:
    size = tokens * channels * (2 + 1 + 4 / 128)
    xs = fresh(size, partial(bf16, tokens, channels), least=1 if size > 400e6 else 2)
    return Case(
        f"{tokens} x {channels} bf16, {'ue8m0' if use_ue8m0 else 'fp32'}{', Hadamard' if hadamard else ''}",
        {"dsa": [partial(dsa.per_token_cast_to_fp8, x, use_ue8m0, hadamard=hadamard) for x in xs]},
        bytes_rate(size, us=False),
        Peers() if hadamard else operators.cast([(x, use_ue8m0) for x in xs]),
        graph=len(xs) > 1,
    )
