"""The router's product, gate and sort in one op, compared with PyTorch's product and our two separate kernels. Every
call of a graph reads another matrix.

The calls run back to back, and each of ours prefetches its matrix while the previous call ends. After another kernel,
as in a model, the prefetch gains less.
"""

from functools import partial

import torch

import dsa
from dsa_bench.harness.case import Case, bf16, f32, fresh_matrices, over, plain_rate

# tokens, channels, experts, experts per token, groups, chosen groups, scores: V3.2, V4-Flash and V4-Pro
SHAPES = [
    (tokens, *model)
    for model in (
        (7168, 256, 8, 8, 4, "sigmoid"),
        (4096, 256, 6, 1, 1, "sqrtsoftplus"),
        (7168, 384, 6, 1, 1, "sqrtsoftplus"),
    )
    for tokens in (1, 8, 32, 64)
]
APART = "product, gate, sort"


def case(tokens: int, channels: int, experts: int, top_k: int, groups: int, stay: int, scores: str) -> Case:
    x, bias = bf16(tokens, channels), f32(experts)
    options = {"scores": scores, "n_group": groups, "topk_group": stay, "scale": 2.5}

    def separately(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = torch.mm(x, weight.T, out_dtype=torch.float32)
        chosen, factors = dsa.moe_gate(logits, bias, top_k, **options)
        return chosen, factors, *dsa.sort_by_expert(chosen, experts)

    weights = fresh_matrices(experts, channels)
    return Case(
        f"{tokens} tokens x {channels}, {top_k} of {experts} experts, {scores}",
        {
            "dsa": [partial(dsa.route_to_experts, x, weight, bias, top_k, **options) for (weight,) in weights],
            **over(weights, {APART: separately}),
        },
        plain_rate(2 * experts * channels),
        graph=True,
        yardsticks={APART},
    )
