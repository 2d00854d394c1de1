"""The weighted sum of the routed experts' outputs, plus the shared expert's: bytes per second and their share of the
copy bandwidth, compared with the formula in PyTorch."""

import torch

import dsa
from dsa_bench.harness.case import Case, bf16, bytes_case

# tokens, experts per token, channels: V3.2 and V4-Flash
SHAPES = [(tokens, k, channels) for tokens in (4096, 128, 1) for k, channels in ((8, 7168), (6, 4096))]


def _torch(y: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    routed = (y[rows.flatten()].float().unflatten(0, rows.shape) * weights[..., None]).sum(1)
    return (routed + shared.float()).to(y.dtype)


def case(tokens: int, k: int, channels: int) -> Case:
    def inputs() -> tuple[torch.Tensor, ...]:
        rows = torch.randperm(tokens * k, device="cuda").int().view(tokens, k)
        return bf16(tokens * k, channels), rows, torch.rand(tokens, k, device="cuda"), bf16(tokens, channels)

    return bytes_case(
        f"{tokens} tokens, {k} experts, {channels} channels, bf16, shared",
        tokens * ((k + 2) * channels * 2 + 8 * k),
        inputs,
        {"dsa": dsa.combine_experts, "torch": _torch},
        baselines={"torch"},
    )
