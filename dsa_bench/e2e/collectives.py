"""The share of a GPU's time that it spends with other GPUs: their data, and the wait for them."""

import re
from collections.abc import Sequence

from dsa_bench.e2e.trace import Event, in_turn

# Kernels of NCCL, and torch's sum over symmetric memory, which stands in a namespace.
NAMES = re.compile(r"\bnccl|\bone_shot_all_reduce")


def share(events: Sequence[Event]) -> float:
    """The time of collectives over that of all kernels, copies and fills, from the events of a Chrome trace whose first
    collective is where the ranks begin together: what comes after it counts. A collective that waits for another rank
    is running. ValueError for a trace in which nothing comes after."""
    work = [(us, NAMES.search(event["name"]) is not None) for event, us in in_turn(events)]
    begin = next((i + 1 for i, (_, talks) in enumerate(work) if talks), len(work))
    whole = sum(us for us, _ in work[begin:])
    if not whole:
        raise ValueError(f"events: must have kernels behind a collective, got {len(work)} in {len(events)} events")
    return sum(us for us, talks in work[begin:] if talks) / whole
