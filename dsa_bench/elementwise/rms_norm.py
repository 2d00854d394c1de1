"""The RMS norm: bytes per second and their share of the copy bandwidth, compared with PyTorch's `rms_norm` and with the
formula in PyTorch operations."""

from collections.abc import Callable
from functools import partial

import torch

import dsa
from dsa.reference.elementwise import rms_norm as reference
from dsa_bench.harness.case import Case, bf16, bytes_rate, f32, fresh, over

# Rows, channels, with weights, with gradients. Without gradients: V3.2's hidden state and query latent, and V4's query
# heads (64 per token). With gradients: V3.2's hidden state and query latent, and a small model's hidden state.
SHAPES = [
    (16384, 7168, True),
    (4096, 7168, True),
    (4096, 1536, True),
    (4096 * 64, 512, False),
    *(shape for t in (128, 1) for shape in ((t, 7168, True), (t, 1536, True), (t * 64, 512, False))),
    *((rows, channels, True, True) for rows, channels in ((16384, 7168), (16384, 1536), (65536, 256))),
]
EPS = 1e-6


def case(rows: int, channels: int, weighted: bool, gradients: bool = False) -> Case:
    def one() -> tuple[torch.Tensor, torch.Tensor | None]:
        weight = f32(channels).requires_grad_(gradients) if weighted else None
        return bf16(rows, channels).requires_grad_(gradients), weight

    grad = bf16(rows, channels) if gradients else None

    def call(norm: Callable[..., torch.Tensor], x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """Return y or, with gradients, the gradient of x; the gradient of the weights is then computed too."""
        y = norm(x, weight, EPS)
        return torch.autograd.grad(y, (x, weight), grad)[0] if gradients else y

    size = (5 if gradients else 2) * 2 * rows * channels + (4 * channels if weighted else 0)
    inputs = fresh(size, one)
    # PyTorch's norm gets weights in the dtype of x; ours and the formula get fp32 weights.
    narrow = [
        (x, None if weight is None else weight.detach().to(x.dtype).requires_grad_(gradients)) for x, weight in inputs
    ]
    calls = over(inputs, {"dsa": partial(call, dsa.rms_norm), "formula": partial(call, reference.rms_norm)})
    calls |= over(
        narrow, {"torch": partial(call, lambda x, *rest: torch.nn.functional.rms_norm(x, x.shape[-1:], *rest))}
    )
    return Case(
        f"{rows} x {channels} bf16{', weights' if weighted else ''}{', gradients' if gradients else ''}",
        calls,
        bytes_rate(size),
        graph=True,
        baselines={"torch", "formula"},
    )
