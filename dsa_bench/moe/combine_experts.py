"""The experts' sum: bytes per second and their share of the copy bandwidth, compared with PyTorch's formula."""

import torch

import dsa
from dsa_bench.harness.calls import over
from dsa_bench.harness.case import Case, bytes_rate, fresh

# tokens, experts of a token, channels: V3.2's and V4-Flash's
SHAPES = [(tokens, k, channels) for tokens in (4096, 128, 1) for k, channels in ((8, 7168), (6, 4096))]


def _torch(y: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    routed = (y[rows.flatten()].float().unflatten(0, rows.shape) * weights[..., None]).sum(1)
    return (routed + shared.float()).to(y.dtype)


def case(tokens: int, k: int, channels: int) -> Case:
    def one() -> tuple[torch.Tensor, ...]:
        y = torch.randn(tokens * k, channels, device="cuda").bfloat16()
        rows = torch.randperm(tokens * k, device="cuda").int().view(tokens, k)
        return y, rows, torch.rand(tokens, k, device="cuda"), torch.randn(tokens, channels, device="cuda").bfloat16()

    size = tokens * ((k + 2) * channels * 2 + 8 * k)
    calls = over(fresh(size, one), {"dsa": dsa.combine_experts, "torch": _torch})
    name = f"{tokens} tokens, {k} experts, {channels} channels, bf16, shared"
    return Case(name, calls, bytes_rate(size), graph=True, baselines=frozenset({"torch"}))
