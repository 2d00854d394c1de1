"""Router and sort by a table of experts, beside PyTorch's formula and our sort, over fresh matrices.

Calls stand one behind the other, and a call of ours asks for its matrix while the one before ends: behind another
kernel, as in a model, it gains less.
"""

from functools import partial

import torch

import dsa
from dsa_bench.harness.case import Case

# tokens, channels, experts, experts of a token: V4-Flash's and V4-Pro's
SHAPES = [(tokens, *model) for model in ((4096, 256, 6), (7168, 384, 6)) for tokens in (1, 8, 32, 64)]
_VOCABULARY = 129280
_FRESH_BYTES = 200e6  # of matrices in a graph: more than the L2 cache holds
_SCALE = 2.5


def case(tokens: int, channels: int, experts: int, top_k: int) -> Case:
    x, size = torch.randn(tokens, channels, device="cuda").bfloat16(), 2 * experts * channels
    weights = [(torch.randn(experts, channels, device="cuda") / 40).bfloat16() for _ in range(int(_FRESH_BYTES / size))]
    table = torch.randint(experts, (_VOCABULARY, top_k), device="cuda")
    ids = torch.randint(_VOCABULARY, (tokens,), device="cuda")

    def formula(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        named = table[ids]
        logits = torch.mm(x, weight.T, out_dtype=torch.float32)
        s = torch.nn.functional.softplus(logits.gather(1, named)).sqrt()
        return named, s / (s.sum(1, keepdim=True) + 1e-20) * _SCALE, *dsa.sort_by_expert(named, experts)

    def check(found: tuple[torch.Tensor, ...]) -> None:
        named, factors, *by_expert = formula(weights[0])
        if not all(map(torch.equal, (found[0], *found[2:]), (named, *by_expert))):
            raise AssertionError("not the table's experts, or not in their order")
        torch.testing.assert_close(found[1], factors, rtol=1e-3, atol=1e-5)

    calls = {
        "dsa": [partial(dsa.route_by_table, x, weight, table, ids, scale=_SCALE) for weight in weights],
        "formula, sort": [partial(formula, weight) for weight in weights],
    }

    def figure(ms: float) -> str:
        return f"{ms * 1e3:.1f} us, {size / (ms * 1e-3) / 1e9:.0f} GB/s"

    name = f"{tokens} tokens x {channels}, {top_k} of {experts} experts by a table"
    return Case(name, calls, figure, check, graph=True, baselines=frozenset({"formula, sort"}))
