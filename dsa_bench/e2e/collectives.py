"""The share of a GPU's time that it spends with other GPUs: their data, and the wait for them."""

import re
from collections.abc import Sequence

from dsa_bench.e2e.trace import GPU_WORK, Event

# Kernels of NCCL, and torch's sum over symmetric memory, which stands in a namespace.
NAMES = re.compile(r"\bnccl|\bone_shot_all_reduce")


def share(events: Sequence[Event]) -> float:
    """The time of collectives over that of all kernels, copies and fills in the events of a Chrome trace. A collective
    that waits for another rank is running. Work that runs at the same time counts twice. ValueError for a trace in
    which the GPU does nothing."""
    work = [(event["name"], event["dur"]) for event in events if event.get("cat") in GPU_WORK]
    whole = sum(duration for _, duration in work)
    if not whole:
        raise ValueError(f"events: must have kernels with a duration, got {len(work)} in {len(events)} events")
    return sum(duration for name, duration in work if NAMES.search(name)) / whole
