"""Time and memory of a call that several ranks make together, each on its GPU."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from dsa_layers.parallel.ranks import Ranks

_L2_BYTES = 256 << 20  # more than the L2 cache holds


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
