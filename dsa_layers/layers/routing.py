"""Where the router, the gate and the order of entries by expert are one op's: for few tokens, as decoding has them."""

import torch

import dsa
from dsa_layers.layers.linear import linear_fp32

# What the kernel takes. More tokens make the product with the matrix one that PyTorch's libraries are made for.
MOST_TOKENS, MOST_EXPERTS, CHANNEL_MULTIPLE = 128, 512, 32
HALVES = torch.bfloat16, torch.float16

Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def choose(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, top_k: int, **options: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """(experts, weights) of `dsa.moe_gate`, with logits x W^T in fp32."""
    return dsa.moe_gate(linear_fp32(x, weight), bias, top_k, **options)


def route(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    first: int,
    count: int,
    **options: object,
) -> Routed | None:
    """(experts, weights) as `choose` gives them, and (order, rows, ends) as `dsa.sort_by_expert` does for the `count`
    experts from number `first` on; None where no op does all of it."""
    if not _takes(x, weight):
        return None
    return dsa.route_to_experts(x, weight, bias, top_k, first_expert=first, count=count, **options)


def _takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    if torch.is_grad_enabled() or x.dtype != weight.dtype or x.dtype not in HALVES:
        return False
    few = len(x) <= MOST_TOKENS and len(weight) <= MOST_EXPERTS and x.shape[1] % CHANNEL_MULTIPLE == 0
    return few and (not x.is_cuda or dsa.backends.runs_kernel("route_to_experts", x))
