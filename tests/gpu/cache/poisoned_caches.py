"""Caches of every layout for tests of what writes and reads them."""

import torch

import dsa
from dsa.testing import poisoned


def poisoned_cache(layout, d, pages=9, page_size=64):
    """A cache of NaN, with its padding: of a dtype's numbers, "index" of keys and scales, "v32" or "v4"."""
    if layout == "v4":
        cache = dsa.make_v4_cache(pages, page_size, "cuda")
        torch.as_strided(cache, (pages, cache.stride(0)), (cache.stride(0), 1)).fill_(0xFF)
        return cache
    width = {"v32": 656, "index": d + 4}.get(layout, d)
    dtype = torch.uint8 if layout in ("v32", "index") else getattr(torch, layout)
    return poisoned((pages, page_size, 1, width), dtype, "cuda")


def random_slots(cache, tokens):
    return torch.randperm(cache.shape[0] * cache.shape[1], device="cuda")[:tokens]


def with_slots_outside(slots, capacity, dtype):
    """-> slots of this dtype, of which some lie outside a cache of so many slots, and the same with -1 for these."""
    outside = [-1, capacity, -(2**31), 2**31 - 1]
    outside += [2**32, 2**63 - 1, -(2**32) + 5, 2**40 + 5] if dtype == torch.int64 else []
    given, skipped, where = slots.to(dtype, copy=True), slots.clone(), slice(1, 1 + len(outside))
    given[where], skipped[where] = torch.tensor(outside, device="cuda"), -1
    return given, skipped
