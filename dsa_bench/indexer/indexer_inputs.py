"""The indexer's queries and keys to FP8 in one kernel, beside separate operations (torch, then our cast)."""

from functools import cache, partial

import torch

import dsa
from dsa.testing import copy_bandwidth
from dsa_bench.harness.agreement import agree
from dsa_bench.harness.case import Call, Case

# tokens; queries (64 heads) or keys
SHAPES = [(8192, "queries"), (64, "queries"), (8192, "keys"), (64, "keys")]
HEADS, DIM, ROTATED = 64, 128, 64
_FRESH_BYTES = 400e6  # of inputs in a graph: more than the L2 cache holds
_ceiling = cache(copy_bandwidth)


def _queries(tokens: int, cos: torch.Tensor, sin: torch.Tensor) -> tuple[Call, Call]:
    q = torch.randn(tokens, HEADS, DIM, device="cuda").bfloat16()
    weights = torch.randn(tokens, HEADS, device="cuda")

    def separately() -> object:
        q8, scale = dsa.per_token_cast_to_fp8(dsa.apply_rotary(q, cos, sin, interleaved=False), hadamard=True)
        return q8, weights * scale.squeeze(-1)

    return partial(dsa.quantize_indexer_queries, q, weights, cos, sin), separately


def _keys(tokens: int, cos: torch.Tensor, sin: torch.Tensor) -> tuple[Call, Call]:
    k = torch.randn(tokens, DIM, device="cuda").bfloat16()
    gain, bias = torch.randn(DIM, device="cuda"), torch.randn(DIM, device="cuda")
    # One for each: what is in them is compared.
    cache, apart = (torch.zeros(2 * tokens // 64, 64, 1, DIM + 4, dtype=torch.uint8, device="cuda") for _ in range(2))
    slots = torch.randperm(2 * tokens, device="cuda")[:tokens]

    def in_one() -> torch.Tensor:
        dsa.write_indexer_keys(k, gain, bias, cos, sin, cache, slots)
        return cache

    def separately() -> torch.Tensor:
        normed = torch.nn.functional.layer_norm(k.float(), (DIM,), gain, bias, 1e-6).to(k.dtype)
        k8, scale = dsa.per_token_cast_to_fp8(dsa.apply_rotary(normed, cos, sin, interleaved=False), hadamard=True)
        dsa.write_indexer_cache(k8, scale.squeeze(-1), apart, slots)
        return apart

    return in_one, separately


def case(tokens: int, what: str) -> Case:
    vectors = tokens * (HEADS if what == "queries" else 1)
    size = vectors * (2 * DIM + DIM + 8) + tokens * ROTATED * 4
    pairs = []
    for _ in range(min(64, max(2, int(_FRESH_BYTES / size)))):
        angles = torch.randn(tokens, ROTATED // 2, device="cuda")
        pairs.append((_queries if what == "queries" else _keys)(tokens, angles.cos(), angles.sin()))

    def figure(ms: float) -> str:
        rate = size / (ms * 1e-3)
        return f"{ms * 1e3:.1f} us, {rate / 1e9:.0f} GB/s, {rate / _ceiling():.0%} of copy"

    name = f"{what} of {tokens} tokens{f', H {HEADS}' if what == 'queries' else ''}, bf16"
    fused, separate = map(list, zip(*pairs))
    calls, apart = {"dsa": fused, "separate": separate}, frozenset({"separate"})
    if what == "queries":  # rotated and cast by our ops
        return Case(name, calls, figure, graph=True, yardsticks=apart)
    return Case(name, calls, figure, graph=True, baselines=apart, agree=_agree)


def _agree(theirs: torch.Tensor, ours: torch.Tensor) -> None:
    """What is in the caches."""
    slots = torch.arange(ours.shape[0] * 64, device=ours.device)
    agree(*(dsa.read_indexer_cache(pages, slots) for pages in (theirs, ours)))
