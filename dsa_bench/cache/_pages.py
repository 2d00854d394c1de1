"""Helpers of the cache benchmarks: empty pages, the bytes of a token, random slots, and a comparison of two caches."""

from collections.abc import Callable

import torch

import dsa
from dsa_bench.harness.case import agree

PAGE = 64
# DIMS: {layout: channels of a latent}. BYTES: {layout: bytes per token}.
DIMS = {"V3.2": 576, "V4": 512, "bf16": 576}
BYTES = {"V3.2": 656, "V4": 584, "bf16": 1152}


def empty_pages(tokens: int, layout: str) -> torch.Tensor:
    pages = -(-tokens // PAGE)
    if layout == "V4":
        return dsa.make_v4_cache(pages, PAGE, "cuda")
    if layout == "bf16":
        return torch.zeros(pages, PAGE, 1, DIMS[layout], dtype=torch.bfloat16, device="cuda")
    return empty_bytes(pages, BYTES[layout])


def empty_bytes(pages: int, per_token: int) -> torch.Tensor:
    return torch.zeros(pages, PAGE, 1, per_token, dtype=torch.uint8, device="cuda")


def shuffled_slots(tokens: int) -> torch.Tensor:
    """Return int64 [tokens] slots as in a serving cache: pages in random order, tokens within a page in consecutive
    slots."""
    order = torch.randperm(-(-tokens // PAGE), device="cuda")
    return (order[:, None] * PAGE + torch.arange(PAGE, device="cuda")).view(-1)[:tokens]


def same_contents(read: Callable[..., object], slots: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Return a function (theirs, ours) that compares what `read` returns for these two caches (`agree`)."""
    return lambda theirs, ours: agree(*(read(pages, slots) for pages in (theirs, ours)))
