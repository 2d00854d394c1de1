"""Slots of which some are outside the cache."""

import torch


def with_slots_outside(slots, capacity, dtype):
    """Returns slots of this dtype, some of them outside a cache of `capacity` slots, and the same slots with -1 for
    these."""
    outside = [-1, capacity, -(2**31), 2**31 - 1]
    outside += [2**32, 2**63 - 1, -(2**32) + 5, 2**40 + 5] if dtype == torch.int64 else []
    given, skipped, where = slots.to(dtype, copy=True), slots.clone(), slice(1, 1 + len(outside))
    given[where], skipped[where] = torch.tensor(outside, device="cuda"), -1
    return given, skipped
