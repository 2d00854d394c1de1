"""One more token for every running sequence; on a GPU, a CUDA graph."""

from collections.abc import Sequence

import torch

from dsa_layers.batch.decode_inputs import DecodeInputs, Running
from dsa_layers.cache.cache import Cache
from dsa_layers.families.model import Model


class _Padding:
    """A sequence of one token that fills up a batch. It has a page and a state slot of its own."""

    def __init__(self, cache: Cache) -> None:
        self.tokens, self.pages, self.state_slot = [0], cache.allocator.allocate(1), cache.state_slots.allocate(1)[0]


class DecodeStep:
    """logits fp32 [B, vocab_size] = step(sequences): the logits of the token after each of B sequences.

    On a GPU the pass is captured as a CUDA graph once for a number of sequences and of pages, both rounded up to a
    power of two, and replayed from then on: one launch instead of thousands. The first pass of a size runs twice,
    which changes nothing: it writes the same numbers to the same places. The sequences that fill up a batch write to a
    page and a state slot that are taken from the cache for them. On a CPU, without `capture`, and for models whose
    decoding passes cannot be captured, the pass runs without a graph.

    The next step overwrites the logits.
    """

    def __init__(self, model: Model, cache: Cache, *, capture: bool = True) -> None:
        self._model, self._cache = model, cache
        self._device = next(model.parameters()).device
        self._captures = capture and self._device.type == "cuda" and model.captures_decode
        self._padding = _Padding(cache)
        self._graphs: dict[tuple[int, int], tuple[DecodeInputs, torch.cuda.CUDAGraph, torch.Tensor]] = {}

    @torch.inference_mode()
    def __call__(self, sequences: Sequence[Running]) -> torch.Tensor:
        count, page_size = len(sequences), self._cache.page_size
        pages = -(-max(len(s.tokens) for s in sequences) // page_size)
        if not self._captures:
            inputs = DecodeInputs(count, pages, page_size, self._device)
            inputs.fill(sequences, self._padding)
            return self._run(inputs)
        size = _power_of_two(count), _power_of_two(pages)
        if size not in self._graphs:
            inputs = DecodeInputs(*size, page_size, self._device)
            inputs.fill(sequences, self._padding)
            self._graphs[size] = (inputs, *self._capture(inputs))
        inputs, graph, logits = self._graphs[size]
        inputs.fill(sequences, self._padding)
        graph.replay()
        return logits[:count]

    def _run(self, inputs: DecodeInputs) -> torch.Tensor:
        return self._model(inputs.tokens, inputs.batch(), self._cache)

    def _capture(self, inputs: DecodeInputs) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """The pass as a graph, and its logits. Runs it first: kernels compile and libraries set up at a first call."""
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            self._run(inputs)
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # One pool for all: only one graph runs at a time, and its logits are read before the next.
        pool = next((g.pool() for _, g, _ in self._graphs.values()), None)
        with torch.cuda.graph(graph, pool=pool):
            logits = self._run(inputs)
        return graph, logits


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
