"""Time and memory of a call that several ranks make together, each on its GPU."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dsa_layers.parallel.ranks import Ranks

_L2_BYTES = 256 << 20  # more than the L2 cache holds


class Launching(NamedTuple):
    """What a call does on the host: milliseconds until all is launched, and how often it asked the driver for memory of
    the GPU and for pinned memory, on the rank where that is most."""

    ms: float
    allocations: int
    pinned: int

    def __str__(self) -> str:
        return f"host {self.ms:.2f} ms, {self.allocations} allocations, {self.pinned} of pinned memory"


class Clock:
    """All ranks make the same calls of it."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks, self.device = ranks, device
        self._scratch = torch.empty(_L2_BYTES, dtype=torch.uint8, device=device)
        self._met = torch.zeros(1, device=device)

    def times(self, call: Callable[[], object], repeats: int) -> torch.Tensor:
        """Milliseconds [ranks, repeats] on the GPUs' clocks. Before each call the L2 cache is emptied and the GPUs wait
        for each other; the hosts do not, and run ahead."""
        pairs = []
        for _ in range(repeats):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._scratch.zero_()
            self.meet()
            start.record()
            call()
            stop.record()
            pairs.append((start, stop))
        torch.cuda.synchronize()
        return torch.tensor(self.everyones([start.elapsed_time(stop) for start, stop in pairs]))

    def launching(self, call: Callable[[], object]) -> Launching:
        """Of a call on GPUs that have nothing to do. A time near that of `times` is the host's: the GPU waits for
        launches. But of more than about a thousand launches, which is what a GPU's queue holds, the host waits, too."""
        self.meet()
        self.wait()
        before, begin = self.asked(), time.perf_counter()
        call()
        ms = (time.perf_counter() - begin) * 1e3
        asked = [after - own for after, own in zip(self.asked(), before)]
        self.wait()
        ms, allocations, pinned = map(max, zip(*self.everyones((ms, *asked))))
        return Launching(ms, allocations, pinned)

    def meet(self) -> None:
        """The GPUs go on together from here. It is a collective."""
        if self._ranks.size == 1:
            return
        dist.all_reduce(self._met, group=self._ranks.group)

    def everyones(self, own: Any) -> list[Any]:
        """What every rank has, in their order."""
        if self._ranks.size == 1:
            return [own]
        found: list[Any] = [None] * self._ranks.size
        dist.all_gather_object(found, own, group=self._ranks.group)
        return found

    def forget_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        """The bytes that tensors took at most on a GPU, since `forget_peak`."""
        return max(self.everyones(torch.cuda.max_memory_allocated(self.device) - self._scratch.nbytes))

    def free(self) -> int:
        """Bytes that each GPU has left."""
        return min(self.everyones(torch.cuda.mem_get_info(self.device)[0]))

    def wait(self) -> None:
        """Until this rank's GPU has nothing to do."""
        torch.cuda.synchronize(self.device)

    def asked(self) -> tuple[int, int]:
        """How often this process has asked the driver for memory of the GPU, and for pinned memory."""
        stats = torch.cuda.memory_stats(self.device), torch.cuda.host_memory_stats()
        return stats[0]["num_device_alloc"], stats[1]["num_host_alloc"]
