"""The indexer's queries rotated and cast to FP8 in one kernel, and its keys normed, rotated, cast and written to the
cache in one kernel. They are compared with separate operations: our rotation and cast for queries; torch's layer norm
and our rotation, cast and write for keys."""

from functools import partial

import torch

import dsa
from dsa_bench.cache._pages import PAGE, empty_bytes, same_contents
from dsa_bench.harness.case import Call, Case, angles, bf16, bytes_rate, f32, fresh_calls, into

# tokens; queries (64 heads) or keys
SHAPES = [(8192, "queries"), (64, "queries"), (8192, "keys"), (64, "keys")]
HEADS, DIM, ROTATED = 64, 128, 64


def _queries(tokens: int) -> dict[str, Call]:
    q, weights, (cos, sin) = bf16(tokens, HEADS, DIM), f32(tokens, HEADS), angles(tokens, ROTATED)

    def separately() -> object:
        q8, scale = dsa.per_token_cast_to_fp8(dsa.apply_rotary(q, cos, sin, interleaved=False), hadamard=True)
        return q8, weights * scale.squeeze(-1)

    return {"dsa": partial(dsa.quantize_indexer_queries, q, weights, cos, sin), "separate": separately}


def _keys(tokens: int) -> dict[str, Call]:
    k, gain, bias, (cos, sin) = bf16(tokens, DIM), f32(DIM), f32(DIM), angles(tokens, ROTATED)
    # Separate caches, because their contents are compared.
    cache, apart = (empty_bytes(2 * tokens // PAGE, DIM + 4) for _ in range(2))
    slots = torch.randperm(2 * tokens, device="cuda")[:tokens]

    in_one = partial(into, cache, partial(dsa.write_indexer_keys, k, gain, bias, cos, sin, cache, slots))

    def separately() -> torch.Tensor:
        normed = torch.nn.functional.layer_norm(k.float(), (DIM,), gain, bias, 1e-6).to(k.dtype)
        k8, scale = dsa.per_token_cast_to_fp8(dsa.apply_rotary(normed, cos, sin, interleaved=False), hadamard=True)
        dsa.write_indexer_cache(k8, scale.squeeze(-1), apart, slots)
        return apart

    return {"dsa": in_one, "separate": separately}


def case(tokens: int, what: str) -> Case:
    of_queries = what == "queries"
    vectors = tokens * (HEADS if of_queries else 1)
    size = vectors * (2 * DIM + DIM + 8) + tokens * ROTATED * 4
    calls = fresh_calls(size, partial(_queries if of_queries else _keys, tokens))
    name = f"{what} of {tokens} tokens{f', H {HEADS}' if of_queries else ''}, bf16"
    if of_queries:  # "separate" is a yardstick, because our ops rotate and cast
        return Case(name, calls, bytes_rate(size), graph=True, yardsticks={"separate"})
    return Case(
        name,
        calls,
        bytes_rate(size),
        graph=True,
        baselines={"separate"},
        agree=same_contents(dsa.read_indexer_cache, torch.arange(2 * tokens, device="cuda")),
    )
