"""The RMS norm: bytes a second and the share of the copy bandwidth, beside PyTorch's own and the formula."""

from functools import cache, partial

import torch

import dsa
from dsa.reference.elementwise import rms_norm as reference
from dsa.testing import assert_close, copy_bandwidth
from dsa_bench.harness.case import Case

# rows, channels, with weights: V3.2's hidden state, its query latent, V4's query heads (64 a token)
SHAPES = [
    (16384, 7168, True),
    (4096, 7168, True),
    (4096, 1536, True),
    (4096 * 64, 512, False),
    *(shape for t in (128, 1) for shape in ((t, 7168, True), (t, 1536, True), (t * 64, 512, False))),
]
EPS = 1e-6
_FRESH_BYTES = 400e6  # of inputs in a graph: more than the L2 cache holds
_ceiling = cache(copy_bandwidth)


def case(rows: int, channels: int, weighted: bool) -> Case:
    size = 2 * 2 * rows * channels + (4 * channels if weighted else 0)
    inputs = [
        (
            torch.randn(rows, channels, device="cuda").bfloat16(),
            torch.randn(channels, device="cuda") if weighted else None,
        )
        for _ in range(min(64, max(2, int(_FRESH_BYTES / size))))
    ]

    def figure(ms: float) -> str:
        rate = size / (ms * 1e-3)
        return f"{ms * 1e3:.1f} us, {rate / 1e9:.0f} GB/s, {rate / _ceiling():.0%} of copy"

    def check(got: torch.Tensor) -> None:
        expected = reference.rms_norm(*inputs[0], EPS)
        assert_close("y", got, expected, abs_tol=1e-6, rel_tol=2.01 / 256, cos_tol=5e-6)

    def torch_norm(x: torch.Tensor, weight: torch.Tensor | None) -> partial:
        # Its weights have the type of x.
        return partial(
            torch.nn.functional.rms_norm, x, (channels,), None if weight is None else weight.to(x.dtype), EPS
        )

    calls = {
        "dsa": [partial(dsa.rms_norm, *i, EPS) for i in inputs],
        "torch": [torch_norm(*i) for i in inputs],
        "formula": [partial(reference.rms_norm, *i, EPS) for i in inputs],
    }
    name, baselines = f"{rows} x {channels} bf16{', weights' if weighted else ''}", frozenset({"torch", "formula"})
    return Case(name, calls, figure, check, graph=True, baselines=baselines)
