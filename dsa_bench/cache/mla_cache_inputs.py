"""Attention's latent projection into the cache in one kernel, beside separate operations (torch, then our write)."""

from functools import cache

import torch

import dsa
from dsa.testing import copy_bandwidth
from dsa_bench.harness.agreement import agree
from dsa_bench.harness.case import Call, Case

# tokens; the cache's layout; whether the rows are kept beside the cache
SHAPES = [
    (16384, "V3.2", True),
    (16384, "V3.2", False),
    (16384, "V4", True),
    (16384, "bf16", False),
    (64, "V3.2", False),
    (64, "V4", False),
]
DIMS = {"V3.2": 576, "V4": 512, "bf16": 576}
BYTES = {"V3.2": 656, "V4": 584, "bf16": 1152}
PAGE, NORMED, ROTATED = 64, 512, 64
_FRESH_BYTES = 400e6  # of inputs in a graph: more than the L2 cache holds
_ceiling = cache(copy_bandwidth)
Results = tuple[torch.Tensor, torch.Tensor | None]


def _pages(count: int, layout: str) -> torch.Tensor:
    if layout == "V4":
        return dsa.make_v4_cache(count, PAGE, "cuda")
    dtype = torch.uint8 if layout == "V3.2" else torch.bfloat16
    return torch.zeros(count, PAGE, 1, 656 if layout == "V3.2" else 576, dtype=dtype, device="cuda")


def _calls(tokens: int, layout: str, keep: bool) -> tuple[Call, Call]:
    d, pages = DIMS[layout], tokens // PAGE
    kv, gain = torch.randn(tokens, d, device="cuda").bfloat16(), torch.randn(NORMED, device="cuda")
    angles = torch.randn(tokens, ROTATED // 2, device="cuda")
    cos, sin, out = angles.cos(), angles.sin(), torch.empty_like(kv) if keep else None
    cache, apart = (_pages(pages, layout) for _ in range(2))  # one for each: what is in them is compared
    order = torch.randperm(pages, device="cuda")
    slots = (order[:, None] * PAGE + torch.arange(PAGE, device="cuda")).view(-1)

    def in_one() -> Results:
        dsa.write_mla_cache(kv, gain, cos, sin, cache, slots, out=out)
        return cache, out

    def separately() -> Results:
        x = kv[:, :NORMED].float()
        normed = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * gain).to(kv.dtype)
        row = dsa.apply_rotary(torch.cat((normed, kv[:, NORMED:]), 1), cos, sin, interleaved=True, dims="last")
        dsa.write_kv_cache(row, apart, slots)
        return apart, dsa.read_kv_cache(apart, slots, dtype=kv.dtype) if keep else None

    return in_one, separately


def case(tokens: int, layout: str, keep: bool) -> Case:
    size = tokens * (2 * DIMS[layout] * (2 if keep else 1) + BYTES[layout] + 4 * ROTATED + 8)
    count = min(64, max(2, int(_FRESH_BYTES / size)))
    ours, separate = map(list, zip(*(_calls(tokens, layout, keep) for _ in range(count))))

    def figure(ms: float) -> str:
        rate = size / (ms * 1e-3)
        return f"{ms * 1e3:.1f} us, {rate / 1e9:.0f} GB/s, {rate / _ceiling():.0%} of copy"

    name = f"{tokens} tokens, {layout}{', rows kept' if keep else ''}"
    calls, baselines = {"dsa": ours, "separate": separate}, frozenset({"separate"})
    return Case(name, calls, figure, graph=True, baselines=baselines, agree=_agree)


def _agree(theirs: Results, ours: Results) -> None:
    """What is in the caches, and the rows where they are kept."""
    slots = torch.arange(ours[0].shape[0] * PAGE, device=ours[0].device)
    agree(*((dsa.read_kv_cache(cache, slots, dtype=torch.bfloat16), rows) for cache, rows in (theirs, ours)))
