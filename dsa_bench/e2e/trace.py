"""The work of a call on the GPU and on the host, as events of a Chrome trace."""

import json
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

# NCCL kernels, sums over symmetric memory, copies between GPUs, and waits for copies of other GPUs.
COLLECTIVES = re.compile(r"\bnccl|one_shot_sum_sm90|experts_sum_sm90|wait_signal|Memcpy PtoP")
GPU_WORK = ("kernel", "gpu_memset", "gpu_memcpy")  # categories of events on the GPU

Event = dict[str, Any]


def in_turn(events: Sequence[Event]) -> Iterator[tuple[Event, float]]:
    """Yield the GPU's work in order of its start, each with the microseconds since the end of all earlier work.

    With programmatic launch a kernel starts while the previous kernel ends, and waits for it. Time in which several
    events run counts once.
    """
    end = float("-inf")
    for event in sorted((event for event in events if event.get("cat") in GPU_WORK), key=lambda event: event["ts"]):
        event_end = event["ts"] + event["dur"]
        yield event, max(event_end - max(event["ts"], end), 0)
        end = max(end, event_end)


def events_of(call: Callable[[], object], *, host: bool = True) -> list[Event]:
    """Profile a call. host: also record the host's operators and ranges, which are most events of a long pass."""
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if host else [ProfilerActivity.CUDA]
    with profile(activities=activities) as recorded:
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        recorded.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]


def collectives_share(events: Sequence[Event]) -> float:
    """Return the fraction of a GPU's time in which it receives data from other GPUs or waits for them.

    This is the time in which only collectives run, over the time in which any kernel, copy or fill runs. It counts from
    the first collective on, where the ranks start together. A collective that waits for another rank counts as running;
    time in which the GPU also computes is not waiting. Raises ValueError if no work follows the first collective.
    """
    work = list(in_turn(events))
    begin = next((i + 1 for i, (event, _) in enumerate(work) if _is_collective(event)), len(work))
    whole = sum(us for _, us in work[begin:])
    if not whole:
        raise ValueError(f"events: must have kernels after a collective, got {len(work)} in {len(events)} events")
    # The same time without collectives.
    others = [work[begin - 1][0], *(event for event, _ in work[begin:] if not _is_collective(event))]
    computing = sum(us for _, us in list(in_turn(others))[1:])
    return (whole - computing) / whole


def _is_collective(event: Event) -> bool:
    return COLLECTIVES.search(event["name"]) is not None
