"""What a call does on the GPU and on the host, as the events of a Chrome trace."""

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

GPU_WORK = ("kernel", "gpu_memset", "gpu_memcpy")  # categories of events that take a GPU's time

Event = dict[str, Any]


def in_turn(events: Sequence[Event]) -> Iterator[tuple[Event, float]]:
    """The GPU's work in the order of its beginnings, each with the microseconds from the end of all before it: a kernel
    that is launched programmatically begins while the one in front ends, and waits for it. Work that runs at the same
    time counts once."""
    end = float("-inf")
    for event in sorted((event for event in events if event.get("cat") in GPU_WORK), key=lambda event: event["ts"]):
        own_end = event["ts"] + event["dur"]
        yield event, max(own_end - max(event["ts"], end), 0)
        end = max(end, own_end)


def events_of(call: Callable[[], object], *, host: bool = True) -> list[Event]:
    """host: with the operators and ranges of the host, which are most of a long pass's events."""
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if host else [ProfilerActivity.CUDA]
    with profile(activities=activities) as recorded:
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        recorded.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]
