"""Passes that are captured as CUDA graphs, one for each size."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from dsa_layers.parallel.one_shot_sum import check_ranks

Inputs = TypeVar("Inputs")
Size = tuple[int, int]
GRAPHS = 96  # kept by default: of all sizes of 64 sequences and a context of 4096 pages there are 91


class CapturedStep(Generic[Inputs]):
    """A pass over tensors of a size, sequences and pages, which are rounded up to powers of two. On a GPU it is
    captured when a size first comes, and replayed from then on: one launch instead of thousands. The first pass of a
    size runs twice, which changes nothing: it writes the same numbers to the same places.

    The next step overwrites what a pass has given. graphs: how many are kept; the one that was used least recently goes
    when another is captured.
    """

    def __init__(self, device: torch.device, captures: bool, graphs: int) -> None:
        self._device, self.captures = device, captures and device.type == "cuda"
        self._most = graphs
        self._graphs: dict[Size, tuple[Inputs, torch.cuda.CUDAGraph, Any]] = {}  # the latest used at the end

    def _step(self, count: int, pages: int, make: Callable[[int, int], Inputs], fill: Callable[[Inputs], None]) -> Any:
        """What the pass gives for so many sequences and pages. make: inputs of a size; fill: writes into them."""
        if not self.captures:
            inputs = make(count, pages)
            fill(inputs)
            return self._run(inputs)
        size = power_of_two(count), power_of_two(pages)
        captured = self._graphs.pop(size, None)
        if captured is None:
            inputs = make(*size)
            fill(inputs)
            captured = (inputs, *self._capture(inputs))
            if len(self._graphs) == self._most:
                del self._graphs[next(iter(self._graphs))]
        self._graphs[size] = captured
        inputs, graph, results = captured
        check_ranks()  # a replay calls no sum that could raise
        fill(inputs)
        graph.replay()
        return results

    def _run(self, inputs: Inputs) -> Any:
        raise NotImplementedError

    def _capture(self, inputs: Inputs) -> tuple[torch.cuda.CUDAGraph, Any]:
        """The pass as a graph, and what it gives. Runs it first: kernels compile and libraries set up then."""
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            self._run(inputs)
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # One pool for all: only one graph runs at a time, and its results are read before the next.
        pool = next((g.pool() for _, g, _ in self._graphs.values()), None)
        with torch.cuda.graph(graph, pool=pool):
            results = self._run(inputs)
        return graph, results


def power_of_two(n: int) -> int:
    """The least one that is at least n."""
    return 1 << (n - 1).bit_length()
