"""Time and memory of calls that several ranks make together, each on its GPU; also of one alone."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from dsa_layers.parallel.ranks import Ranks

_L2_BYTES = 256 << 20  # more than the L2 cache holds


class Clock:
    """All ranks make the same calls of it."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks, self.device = ranks, device
        self._scratch_bytes = 0

    @cached_property
    def _scratch(self) -> torch.Tensor:
        self._scratch_bytes = _L2_BYTES
        return torch.empty(_L2_BYTES, dtype=torch.uint8, device=self.device)

    @cached_property
    def _met(self) -> torch.Tensor:
        return torch.zeros(1, device=self.device)

    def times(self, call: Callable[[], object], repeats: int) -> torch.Tensor:
        """Milliseconds [ranks, repeats] on the GPUs' clocks. Before each call the L2 cache is emptied and the GPUs wait
        for each other; the hosts do not, and run ahead."""
        pairs = []
        for _ in range(repeats):
            self._scratch.zero_()
            self.meet()
            start = self.mark()
            call()
            pairs.append((start, self.mark()))
        return torch.tensor(self.everyones([self.ms(*pair) for pair in pairs]))

    def mark(self) -> Any:
        """An event on the GPU's clock: when all earlier launches are done."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, begin: Any, end: Any) -> float:
        """Milliseconds between two marks, once the GPU has passed the second."""
        end.synchronize()
        return begin.elapsed_time(end)

    def meet(self) -> None:
        """The GPUs go on together from here. It is a collective."""
        if self._ranks.size > 1:
            dist.all_reduce(self._met, group=self._ranks.group)

    def everyones(self, own: Any) -> list[Any]:
        """What every rank has, in their order."""
        if self._ranks.size == 1:
            return [own]
        found: list[Any] = [None] * self._ranks.size
        dist.all_gather_object(found, own, group=self._ranks.group)
        return found

    def held(self) -> int:
        """Bytes that tensors take now on this rank's GPU."""
        return torch.cuda.memory_allocated(self.device) - self._scratch_bytes

    def forget_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        """The most bytes that tensors took on a GPU since `forget_peak`."""
        return max(self.everyones(torch.cuda.max_memory_allocated(self.device) - self._scratch_bytes))

    def free(self) -> int:
        """Bytes that each GPU has left."""
        return min(self.everyones(torch.cuda.mem_get_info(self.device)[0]))
