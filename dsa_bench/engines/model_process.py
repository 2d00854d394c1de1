"""What the benchmark adds to the process that holds an engine's model."""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dsa_bench.engines import weights

GIB = 1 << 30
LARGE = 1 << 28  # bytes; parameters as large as the routed experts of a layer are shared between layers


class Measured:
    """Mixed into the class that holds the model. The benchmark calls the methods by name."""

    def peak_gib(self) -> float:
        """Return the most memory that torch had allocated since the last call."""
        peak = torch.cuda.max_memory_allocated() / GIB
        torch.cuda.reset_peak_memory_stats()
        return peak

    def trace_start(self) -> None:
        self._trace = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self._trace.__enter__()

    def trace_stop(self) -> list[tuple[str, float, int]]:
        """Return [(kernel, ms, launches)], longest first."""
        torch.cuda.synchronize()
        self._trace.__exit__(None, None, None)
        kernels: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
        for event in self._trace.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                kernels[event.name][0] += event.time_range.elapsed_us() / 1e3
                kernels[event.name][1] += 1
        del self._trace
        return sorted(((name, ms, count) for name, (ms, count) in kernels.items()), key=lambda row: -row[1])


@contextmanager
def sharing_parameters() -> Iterator[None]:
    """Inside this context, large parameters of equal names and shapes are made as one tensor."""
    first: dict[tuple[Any, ...], torch.Tensor] = {}
    register = torch.nn.Module.register_parameter

    def shared(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None and parameter.nbytes >= LARGE and parameter.dim() == 3:
            parameter.data = first.setdefault((name, parameter.shape, parameter.dtype), parameter.data)
        register(module, name, parameter)

    torch.nn.Module.register_parameter = shared
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register


def fill(model: torch.nn.Module) -> None:
    """Give a model random weights. What the engine makes of large ones is shared between layers, too."""
    generator = torch.Generator("cuda").manual_seed(1)
    for name, values in model.named_parameters():
        if values.dim():  # numbers are scales of caches, which the engine sets
            weights.fill(name, values.data, generator)
    prepared: dict[tuple[Any, ...], torch.nn.Module] = {}
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        large = tuple((name, p.shape) for name, p in module.named_parameters(recurse=False) if p.nbytes >= LARGE)
        if large and hasattr(method, "process_weights_after_loading"):
            method.process_weights_after_loading = _shared(
                method.process_weights_after_loading, prepared, (type(module), large)
            )


def _shared(prepare: Callable[[Any], None], prepared: dict[Any, torch.nn.Module], key: Any) -> Callable[[Any], None]:
    """Wrap the engine's preparation of weights, so that later layers share the first layer's large weights."""

    @functools.wraps(prepare)
    def shared(module: torch.nn.Module) -> None:
        prepare(module)
        first = prepared.setdefault(key, module)
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.nbytes >= LARGE:
                parameter.data = getattr(first, name).data

    return shared
