"""A step's forward and backward pass; on a GPU a CUDA graph, because its kernels take less time than their launches."""

import gc
from collections.abc import Callable, Iterable

import torch
from torch import nn

# Calls that run as they are, before one is captured: they compile kernels, and fill what layers keep.
_AS_THEY_ARE = 3

Losses = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


class Passes:
    """losses(tokens) and the gradients of their weighted sum.

    passes(tokens, weights) returns the losses, fp32 [N] and detached; weights fp32 [N]. The parameters have their
    gradients from then on until the next call.

    captured: calls of one shape that never ask the host for a number; the parameters' gradients are the same tensors in
    every call. Whoever replaces them, by None for example, gets none again.
    """

    def __init__(self, losses: Losses, parameters: Iterable[nn.Parameter], captured: bool) -> None:
        self._losses, self._parameters, self._captured = losses, list(parameters), captured
        self._calls = 0
        # Autograd remembers on which stream a parameter was first used: all calls before the graph's are on its own.
        self._stream = torch.cuda.Stream() if captured else None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: tuple[torch.Tensor, ...] = ()
        self._output: torch.Tensor | None = None

    def __call__(self, tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        self._calls += 1
        if not self._captured:
            return self._run(tokens, weights)
        if self._calls <= _AS_THEY_ARE:
            caller = torch.cuda.current_stream()
            self._stream.wait_stream(caller)
            with torch.cuda.stream(self._stream):
                losses = self._run(tokens, weights)
            caller.wait_stream(self._stream)
            return losses
        if self._graph is None:
            self._inputs = tokens.clone(), weights.clone()
            self._graph = torch.cuda.CUDAGraph()
            gc.collect()  # what is left of earlier calls would be freed in the graph's memory
            with torch.cuda.graph(self._graph, stream=self._stream):
                self._output = self._run(*self._inputs)
        for own, value in zip(self._inputs, (tokens, weights)):
            own.copy_(value)
        self._graph.replay()
        return self._output.clone()

    def _run(self, tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        for parameter in self._parameters:
            parameter.grad = None
        losses = torch.stack(self._losses(tokens))
        (losses * weights).sum().backward()
        return losses.detach()
