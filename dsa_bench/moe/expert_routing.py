"""The gate of the experts, compared with the formula in PyTorch, and the sort by expert, without a comparison."""

from functools import partial

import dsa
from dsa_bench.harness.case import Case, f32, microseconds

# tokens, experts, experts per token, groups, chosen groups, scores: V3.2's gate, then V4-Flash's. With "sort" the case
# times the sort of the tokens by their chosen experts, not the gate.
SHAPES = [
    *((tokens, 256, 8, 8, 4, "sigmoid") for tokens in (1, 128, 4096)),
    *((tokens, 256, 6, 1, 1, "sqrtsoftplus") for tokens in (1, 128, 4096)),
    *((tokens, 256, 8, 8, 4, "sort") for tokens in (1, 128, 4096)),
]


def case(tokens: int, experts: int, top_k: int, groups: int, stay: int, scores: str) -> Case:
    options = {"scores": "sigmoid" if scores == "sort" else scores, "n_group": groups, "topk_group": stay}
    gate = partial(dsa.moe_gate, f32(tokens, experts), f32(experts), top_k, **options)
    call = gate if scores != "sort" else partial(dsa.sort_by_expert, gate()[0], experts)

    def in_torch() -> object:
        with dsa.use_backend("reference"):
            return call()

    calls = {"dsa": [call] * 8}
    if scores != "sort":  # the reference of the sort waits for the GPU, so a graph cannot capture it
        calls["torch"] = [in_torch] * 8
    return Case(
        f"{tokens} tokens, {top_k} of {experts} experts, {scores}", calls, microseconds, graph=True, baselines={"torch"}
    )
