"""The share of a GPU's time that it spends with other GPUs: their data, and the wait for them."""

import re
from collections.abc import Sequence

from dsa_bench.e2e.trace import GPU_WORK, Event

# Kernels of NCCL, and torch's sum over symmetric memory, which stands in a namespace.
NAMES = re.compile(r"\bnccl|\bone_shot_all_reduce")


def share(events: Sequence[Event]) -> float:
    """The time of collectives over that of all kernels, copies and fills, from the events of a Chrome trace whose first
    collective is where the ranks begin together: what comes after it counts. A collective that waits for another rank
    is running. Work that runs at the same time counts twice. ValueError for a trace in which nothing comes after."""
    work = sorted((event for event in events if event.get("cat") in GPU_WORK), key=lambda event: event["ts"])
    talks = [NAMES.search(event["name"]) is not None for event in work]
    begin = talks.index(True) + 1 if True in talks else len(work)
    whole = sum(event["dur"] for event in work[begin:])
    if not whole:
        raise ValueError(f"events: must have kernels behind a collective, got {len(work)} in {len(events)} events")
    return sum(event["dur"] for event, talk in zip(work[begin:], talks[begin:]) if talk) / whole
