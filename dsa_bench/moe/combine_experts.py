"""The experts' sum: bytes a second against the copy bandwidth of the same run, beside PyTorch's formula."""

from functools import cache, partial

import torch

import dsa
from dsa.testing import assert_close, copy_bandwidth
from dsa_bench.harness.case import Case

# tokens, experts of a token, channels: V3.2's and V4-Flash's
SHAPES = [(tokens, k, channels) for tokens in (4096, 128, 1) for k, channels in ((8, 7168), (6, 4096))]
_FRESH_BYTES = 400e6  # of inputs in a graph: more than the L2 cache holds
_ceiling = cache(copy_bandwidth)


def _torch(y: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    routed = (y[rows.flatten()].float().unflatten(0, rows.shape) * weights[..., None]).sum(1)
    return (routed + shared.float()).to(y.dtype)


def _inputs(tokens: int, k: int, channels: int) -> tuple[torch.Tensor, ...]:
    y = torch.randn(tokens * k, channels, device="cuda").bfloat16()
    rows = torch.randperm(tokens * k, device="cuda").int().view(tokens, k)
    return y, rows, torch.rand(tokens, k, device="cuda"), torch.randn(tokens, channels, device="cuda").bfloat16()


def case(tokens: int, k: int, channels: int) -> Case:
    size = tokens * ((k + 2) * channels * 2 + 8 * k)
    inputs = [_inputs(tokens, k, channels) for _ in range(min(64, max(2, int(_FRESH_BYTES / size))))]
    calls = {"dsa": [partial(dsa.combine_experts, *i) for i in inputs], "torch": [partial(_torch, *i) for i in inputs]}

    def figure(ms: float) -> str:
        rate = size / (ms * 1e-3)
        return f"{ms * 1e3:.1f} us, {rate / 1e9:.0f} GB/s, {rate / _ceiling():.0%} of copy"

    def check(got: torch.Tensor) -> None:
        assert_close("out", got, _torch(*inputs[0]), abs_tol=1e-5, rel_tol=2.01 / 256, cos_tol=5e-6)

    name = f"{tokens} tokens, {k} experts, {channels} channels, bf16, shared"
    return Case(name, calls, figure, check, graph=True, baselines=frozenset({"torch"}))
