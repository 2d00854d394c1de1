"""What a process's kernels take, by torch's profiler."""

from collections import defaultdict

import torch


class Trace:
    """Mixed into an engine's worker, whose methods the benchmark calls by name."""

    def trace_start(self) -> None:
        self._trace = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self._trace.__enter__()

    def trace_stop(self) -> list[tuple[str, float, int]]:
        """[(kernel, ms, launches)], longest first."""
        torch.cuda.synchronize()
        self._trace.__exit__(None, None, None)
        kernels: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
        for event in self._trace.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                kernels[event.name][0] += event.time_range.elapsed_us() / 1e3
                kernels[event.name][1] += 1
        del self._trace
        return sorted(((name, ms, count) for name, (ms, count) in kernels.items()), key=lambda row: -row[1])
