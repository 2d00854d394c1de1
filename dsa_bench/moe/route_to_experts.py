"""Router, gate and sort in one, beside the product and our two kernels one after the other, over fresh matrices.

Calls stand one behind the other, and a call of ours asks for its matrix while the one before ends: behind another
kernel, as in a model, it gains less.
"""

from functools import partial

import torch

import dsa
from dsa_bench.harness.case import Case

# tokens, channels, experts, top_k, groups, groups that stay, scores: V3.2's, V4-Flash's and V4-Pro's
SHAPES = [
    (tokens, *model)
    for model in (
        (7168, 256, 8, 8, 4, "sigmoid"),
        (4096, 256, 6, 1, 1, "sqrtsoftplus"),
        (7168, 384, 6, 1, 1, "sqrtsoftplus"),
    )
    for tokens in (1, 8, 32, 64)
]
_FRESH_BYTES = 200e6  # of matrices in a graph: more than the L2 cache holds


def case(tokens: int, channels: int, experts: int, top_k: int, groups: int, stay: int, scores: str) -> Case:
    x, bias = torch.randn(tokens, channels, device="cuda").bfloat16(), torch.randn(experts, device="cuda")
    size = 2 * experts * channels
    count = int(_FRESH_BYTES / size)
    weights = [(torch.randn(experts, channels, device="cuda") / 40).bfloat16() for _ in range(count)]
    options = {"scores": scores, "n_group": groups, "topk_group": stay, "scale": 2.5}

    def by_themselves(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = torch.mm(x, weight.T, out_dtype=torch.float32)
        chosen, factors = dsa.moe_gate(logits, bias, top_k, **options)
        return chosen, factors, *dsa.sort_by_expert(chosen, experts)

    def check(found: tuple[torch.Tensor, ...]) -> None:
        chosen, factors, *by_expert = found
        if not all(torch.equal(a, b) for a, b in zip(by_expert, dsa.sort_by_expert(chosen, experts))):
            raise AssertionError("not the order of the chosen experts")
        expected, expected_factors, *_ = by_themselves(weights[0])
        same = (chosen == expected).all(1)  # but for near-ties
        if same.float().mean() < 0.9 or not torch.allclose(factors[same], expected_factors[same], rtol=1e-3):
            raise AssertionError("not the choices of the product and the gate")

    calls = {
        "dsa": [partial(dsa.route_to_experts, x, weight, bias, top_k, **options) for weight in weights],
        "product, gate, sort": [partial(by_themselves, weight) for weight in weights],
    }

    def figure(ms: float) -> str:
        return f"{ms * 1e3:.1f} us, {size / (ms * 1e-3) / 1e9:.0f} GB/s"

    name = f"{tokens} tokens x {channels}, {top_k} of {experts} experts, {scores}"
    return Case(name, calls, figure, check, graph=True, yardsticks=frozenset({"product, gate, sort"}))
