"""What a call does on the GPU and on the host, as the events of a Chrome trace."""

import json
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

# Kernels of NCCL, sums over symmetric memory, and copies from GPU to GPU with the wait for those of others.
COLLECTIVES = re.compile(r"\bnccl|one_shot_sum_sm90|experts_sum_sm90|wait_signal|Memcpy PtoP")
GPU_WORK = ("kernel", "gpu_memset", "gpu_memcpy")  # categories of events that take a GPU's time

Event = dict[str, Any]


def in_turn(events: Sequence[Event]) -> Iterator[tuple[Event, float]]:
    """The GPU's work in order of its start, each with the microseconds since the end of all earlier work: a kernel that
    is launched programmatically starts while the previous one ends, and waits for it. Work that runs at the same time
    counts once."""
    end = float("-inf")
    for event in sorted((event for event in events if event.get("cat") in GPU_WORK), key=lambda event: event["ts"]):
        own_end = event["ts"] + event["dur"]
        yield event, max(own_end - max(event["ts"], end), 0)
        end = max(end, own_end)


def events_of(call: Callable[[], object], *, host: bool = True) -> list[Event]:
    """host: also the host's operators and ranges, which are most of a long pass's events."""
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if host else [ProfilerActivity.CUDA]
    with profile(activities=activities) as recorded:
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        recorded.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]


def collectives_share(events: Sequence[Event]) -> float:
    """The share of a GPU's time that is data from other GPUs and the wait for them: the time in which only collectives
    run over the time in which any kernel, copy or fill does. Counted from the first collective on, where the ranks
    begin together. A collective that waits for another rank is running; what the GPU computes meanwhile does not count
    as waiting. Raises ValueError where nothing follows the first collective."""
    work = list(in_turn(events))
    begin = next((i + 1 for i, (event, _) in enumerate(work) if _is_collective(event)), len(work))
    whole = sum(us for _, us in work[begin:])
    if not whole:
        raise ValueError(f"events: must have kernels after a collective, got {len(work)} in {len(events)} events")
    # From the same start, without the collectives.
    others = [work[begin - 1][0], *(event for event, _ in work[begin:] if not _is_collective(event))]
    computing = sum(us for _, us in list(in_turn(others))[1:])
    return (whole - computing) / whole


def _is_collective(event: Event) -> bool:
    return COLLECTIVES.search(event["name"]) is not None
