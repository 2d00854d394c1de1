"""The gate and the sort by expert, compared with the same in PyTorch."""

from functools import partial

import torch

import dsa
from dsa_bench.harness.case import Case

# tokens, experts, top_k, groups, groups that stay, scores; "sort" sorts the chosen experts instead
SHAPES = [
    *((tokens, 256, 8, 8, 4, "sigmoid") for tokens in (1, 128, 4096)),
    *((tokens, 256, 6, 1, 1, "sqrtsoftplus") for tokens in (1, 128, 4096)),
    *((tokens, 256, 8, 8, 4, "sort") for tokens in (1, 128, 4096)),
]


def case(tokens: int, experts: int, top_k: int, groups: int, stay: int, scores: str) -> Case:
    logits = torch.randn(tokens, experts, device="cuda")
    bias = torch.randn(experts, device="cuda")
    kind = "sigmoid" if scores == "sort" else scores
    gate = partial(dsa.moe_gate, logits, bias, top_k, scores=kind, n_group=groups, topk_group=stay)
    call = gate if scores != "sort" else partial(dsa.sort_by_expert, gate()[0], experts)

    def in_torch() -> object:
        with dsa.use_backend("reference"):
            return call()

    calls = {"dsa": [call] * 8}
    if scores != "sort":  # whose reference counts with a synchronisation
        calls["torch"] = [in_torch] * 8

    name = f"{tokens} tokens, {top_k} of {experts} experts, {scores}"
    return Case(name, calls, lambda ms: f"{ms * 1e3:.1f} us", graph=True, baselines=frozenset({"torch"}))
