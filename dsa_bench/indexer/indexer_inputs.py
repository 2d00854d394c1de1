"""The indexer's queries and keys to FP8 in one kernel, compared with separate operations (torch, then our
cast)."""

from functools import partial

import torch

import dsa
from dsa_bench.harness.agreement import agree
from dsa_bench.harness.calls import Call
from dsa_bench.harness.case import Case, bytes_rate, fresh

# tokens; queries (64 heads) or keys
SHAPES = [(8192, "queries"), (64, "queries"), (8192, "keys"), (64, "keys")]
HEADS, DIM, ROTATED = 64, 128, 64


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
    # Each writes to its own cache, as their contents are compared.
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
    of_queries = what == "queries"

    def one() -> tuple[Call, Call]:
        angles = torch.randn(tokens, ROTATED // 2, device="cuda")
        return (_queries if of_queries else _keys)(tokens, angles.cos(), angles.sin())

    vectors = tokens * (HEADS if of_queries else 1)
    size = vectors * (2 * DIM + DIM + 8) + tokens * ROTATED * 4
    fused, separate = map(list, zip(*fresh(size, one)))
    name = f"{what} of {tokens} tokens{f', H {HEADS}' if of_queries else ''}, bf16"
    calls, apart = {"dsa": fused, "separate": separate}, frozenset({"separate"})
    if of_queries:  # rotated and cast by our ops
        return Case(name, calls, bytes_rate(size), graph=True, yardsticks=apart)
    return Case(name, calls, bytes_rate(size), graph=True, baselines=apart, agree=_agree)


def _agree(theirs: torch.Tensor, ours: torch.Tensor) -> None:
    """The contents of the caches."""
    slots = torch.arange(ours.shape[0] * 64, device=ours.device)
    agree(*(dsa.read_indexer_cache(pages, slots) for pages in (theirs, ours)))
