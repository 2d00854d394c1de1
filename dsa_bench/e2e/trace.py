"""What a call does on the GPU and on the host, as the events of a Chrome trace."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

GPU_WORK = ("kernel", "gpu_memset", "gpu_memcpy")  # categories of events that take a GPU's time

Event = dict[str, Any]


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
