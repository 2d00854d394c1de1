"""The share of a GPU's time that it spends with other GPUs: their data, and the wait for them."""

import re
from collections.abc import Sequence

from dsa_bench.e2e.trace import Event, in_turn

# Kernels of NCCL, sums over symmetric memory, and copies from GPU to GPU with the wait for those of others.
NAMES = re.compile(r"\bnccl|one_shot_sum_sm90|experts_sum_sm90|wait_signal|Memcpy PtoP")


def share(events: Sequence[Event]) -> float:
    """The time in which collectives alone run over that in which anything does, kernels, copies and fills, from the
    events of a Chrome trace whose first collective is where the ranks begin together: what comes after it counts. A
    collective that waits for another rank is running; what the GPU computes meanwhile is its own time. ValueError for a
    trace in which nothing comes after."""
    work = list(in_turn(events))
    begin = next((i + 1 for i, (event, _) in enumerate(work) if _talks(event)), len(work))
    whole = sum(us for _, us in work[begin:])
    if not whole:
        raise ValueError(f"events: must have kernels behind a collective, got {len(work)} in {len(events)} events")
    # Behind the same beginning, as if nobody talked.
    others = [work[begin - 1][0], *(event for event, _ in work[begin:] if not _talks(event))]
    computing = sum(us for _, us in list(in_turn(others))[1:])
    return (whole - computing) / whole


def _talks(event: Event) -> bool:
    return NAMES.search(event["name"]) is not None
