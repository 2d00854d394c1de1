"""Time and memory of calls that one rank or several ranks make together, each on its GPU."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from dsa_layers.parallel.ranks import Ranks

_L2_BYTES = 256 << 20  # size of the fill that evicts the L2 cache, which is smaller


class Clock:
    """Measures the time and memory of calls. All ranks must call the same methods in the same order, because methods
    contain collectives."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks, self.device = ranks, device
        self._scratch_bytes = 0

    @cached_property
    def _scratch(self) -> torch.Tensor:
        self._scratch_bytes = _L2_BYTES
        return torch.empty(_L2_BYTES, dtype=torch.uint8, device=self.device)

    @cached_property
    def _aligned(self) -> torch.Tensor:
        return torch.zeros(1, device=self.device)

    def times(self, call: Callable[[], object], repeats: int) -> torch.Tensor:
        """Return the milliseconds [ranks, repeats] of a call on the GPUs' clocks.

        Before each call, a fill evicts the L2 cache and the GPUs wait for each other. The hosts do not wait and run
        ahead.
        """
        pairs = []
        for _ in range(repeats):
            self._scratch.zero_()
            self.align()
            start = self.mark()
            call()
            pairs.append((start, self.mark()))
        return torch.tensor(self.gather([self.ms(*pair) for pair in pairs]))

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, begin: Any, end: Any) -> float:
        end.synchronize()
        return begin.elapsed_time(end)

    def align(self) -> None:
        """Let the GPUs wait for each other, with a collective. With one rank, do nothing."""
        if self._ranks.size > 1:
            dist.all_reduce(self._aligned, group=self._ranks.group)

    def gather(self, value: Any) -> list[Any]:
        if self._ranks.size == 1:
            return [value]
        found: list[Any] = [None] * self._ranks.size
        dist.all_gather_object(found, value, group=self._ranks.group)
        return found

    def held(self) -> int:
        """Return the bytes of the tensors that exist on this rank's GPU, without the clock's scratch."""
        return torch.cuda.memory_allocated(self.device) - self._scratch_bytes

    def forget_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        """Return the peak bytes of tensors since `forget_peak`, without the clock's scratch. With several ranks, the
        largest peak counts."""
        return max(self.gather(torch.cuda.max_memory_allocated(self.device) - self._scratch_bytes))

    def free(self) -> int:
        """Return the free bytes of the GPU, without memory that torch has cached. With several ranks, the smallest
        number counts."""
        return min(self.gather(torch.cuda.mem_get_info(self.device)[0]))
