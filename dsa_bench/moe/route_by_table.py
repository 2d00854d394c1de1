"""Routing by V4's table, which names the experts of each token id, and the sort by expert in one op, compared with the
formula in PyTorch followed by our sort. Every call of a graph reads another matrix.

The calls run back to back, and each of ours prefetches its matrix while the previous call ends. After another kernel,
as in a model, the prefetch gains less.
"""

from functools import partial

import torch

import dsa
from dsa_bench.harness.case import Case, bf16, fresh_matrices, over, plain_rate

# tokens, channels, experts, experts per token: V4-Flash and V4-Pro
SHAPES = [(tokens, *model) for model in ((4096, 256, 6), (7168, 384, 6)) for tokens in (1, 8, 32, 64)]
_VOCABULARY = 129280
_SCALE = 2.5


def case(tokens: int, channels: int, experts: int, top_k: int) -> Case:
    x, table = bf16(tokens, channels), torch.randint(experts, (_VOCABULARY, top_k), device="cuda")
    ids = torch.randint(_VOCABULARY, (tokens,), device="cuda")

    def formula(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        named = table[ids]
        logits = torch.mm(x, weight.T, out_dtype=torch.float32)
        s = torch.nn.functional.softplus(logits.gather(1, named)).sqrt()
        return named, s / (s.sum(1, keepdim=True) + 1e-20) * _SCALE, *dsa.sort_by_expert(named, experts)

    weights = fresh_matrices(experts, channels)
    return Case(
        f"{tokens} tokens x {channels}, {top_k} of {experts} experts by a table",
        {
            "dsa": [partial(dsa.route_by_table, x, weight, table, ids, scale=_SCALE) for (weight,) in weights],
            **over(weights, {"formula, sort": formula}),
        },
        plain_rate(2 * experts * channels),
        graph=True,
        baselines={"formula, sort"},
    )
