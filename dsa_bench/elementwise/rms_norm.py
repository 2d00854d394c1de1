"""The RMS norm: bytes a second and the share of the copy bandwidth, beside PyTorch's own and the formula."""

from collections.abc import Callable
from functools import cache, partial

import torch

import dsa
from dsa.reference.elementwise import rms_norm as reference
from dsa.testing import assert_close, copy_bandwidth
from dsa_bench.harness.case import Case

# Rows, channels, with weights, with gradients. V3.2's hidden state, its query latent and V4's query heads (64 a token);
# with gradients V3.2's two, and a small model's.
SHAPES = [
    (16384, 7168, True),
    (4096, 7168, True),
    (4096, 1536, True),
    (4096 * 64, 512, False),
    *(shape for t in (128, 1) for shape in ((t, 7168, True), (t, 1536, True), (t * 64, 512, False))),
    *((rows, channels, True, True) for rows, channels in ((16384, 7168), (16384, 1536), (65536, 256))),
]
EPS = 1e-6
_FRESH_BYTES = 400e6  # of inputs in a graph: more than the L2 cache holds
_ceiling = cache(copy_bandwidth)


def case(rows: int, channels: int, weighted: bool, gradients: bool = False) -> Case:
    size = (5 if gradients else 2) * 2 * rows * channels + (4 * channels if weighted else 0)
    inputs = [
        (
            torch.randn(rows, channels, device="cuda").bfloat16().requires_grad_(gradients),
            torch.randn(channels, device="cuda").requires_grad_(gradients) if weighted else None,
        )
        for _ in range(min(64, max(2, int(_FRESH_BYTES / size))))
    ]
    grad = torch.randn(rows, channels, device="cuda").bfloat16() if gradients else None

    def figure(ms: float) -> str:
        rate = size / (ms * 1e-3)
        return f"{ms * 1e3:.1f} us, {rate / 1e9:.0f} GB/s, {rate / _ceiling():.0%} of copy"

    def call(norm: Callable[..., torch.Tensor], x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """y; or the gradient of x, and with it those of the weights."""
        y = norm(x, weight)
        return torch.autograd.grad(y, (x, weight), grad)[0] if gradients else y

    def check(got: torch.Tensor) -> None:
        expected = call(formula, *inputs[0])
        assert_close("y", got, expected, abs_tol=1e-3 if gradients else 1e-6, rel_tol=2.01 / 256, cos_tol=5e-6)

    def own(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return dsa.rms_norm(x, weight, EPS)

    def formula(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return reference.rms_norm(x, weight, EPS)

    def torch_norm(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (channels,), weight, EPS)

    # PyTorch's weights have the type of x.
    narrow = [
        (x, None if weight is None else weight.detach().to(x.dtype).requires_grad_(gradients)) for x, weight in inputs
    ]
    calls = {
        name: [partial(call, norm, *i) for i in given]
        for name, norm, given in (("dsa", own, inputs), ("torch", torch_norm, narrow), ("formula", formula, inputs))
    }
    words = f"{', weights' if weighted else ''}{', gradients' if gradients else ''}"
    baselines = frozenset({"torch", "formula"})
    return Case(f"{rows} x {channels} bf16{words}", calls, figure, check, graph=True, baselines=baselines)
