"""Norm, rotation and cache write of attention's latent projection in one kernel, compared with separate operations: the
norm in torch, then our rotation and write and, if rows are kept, our read of the written rows."""

from functools import partial

import torch

import dsa
from dsa_bench.cache._pages import BYTES, DIMS, PAGE, empty_pages, shuffled_slots
from dsa_bench.harness.case import Call, Case, agree, angles, bf16, bytes_rate, f32, fresh_calls, into

# tokens; the cache's layout; whether the rows, as the cache stores them, are also returned ("rows kept")
SHAPES = [
    (16384, "V3.2", True),
    (16384, "V3.2", False),
    (16384, "V4", True),
    (16384, "bf16", False),
    (64, "V3.2", False),
    (64, "V4", False),
]
NORMED, ROTATED = 512, 64
Results = tuple[torch.Tensor, torch.Tensor | None]


def _calls(tokens: int, layout: str, keep: bool) -> dict[str, Call]:
    kv, gain, slots = bf16(tokens, DIMS[layout]), f32(NORMED), shuffled_slots(tokens)
    cos, sin = angles(tokens, ROTATED)
    out = torch.empty_like(kv) if keep else None
    # Separate caches, because their contents are compared.
    cache, apart = (empty_pages(tokens, layout) for _ in range(2))

    write = partial(dsa.write_mla_cache, kv, gain, cos, sin, cache, slots, out=out)

    def separately() -> Results:
        x = kv[:, :NORMED].float()
        normed = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * gain).to(kv.dtype)
        row = dsa.apply_rotary(torch.cat((normed, kv[:, NORMED:]), 1), cos, sin, interleaved=True, dims="last")
        dsa.write_kv_cache(row, apart, slots)
        return apart, dsa.read_kv_cache(apart, slots, dtype=kv.dtype) if keep else None

    return {"dsa": partial(into, (cache, out), write), "separate": separately}


def case(tokens: int, layout: str, keep: bool) -> Case:
    size = tokens * (2 * DIMS[layout] * (2 if keep else 1) + BYTES[layout] + 4 * ROTATED + 8)
    return Case(
        f"{tokens} tokens, {layout}{', rows kept' if keep else ''}",
        fresh_calls(size, partial(_calls, tokens, layout, keep)),
        bytes_rate(size),
        graph=True,
        baselines={"separate"},
        agree=_agree,
    )


def _agree(theirs: Results, ours: Results) -> None:
    slots = torch.arange(ours[0].shape[0] * PAGE, device=ours[0].device)
    agree(*((dsa.read_kv_cache(cache, slots, dtype=torch.bfloat16), rows) for cache, rows in (theirs, ours)))
