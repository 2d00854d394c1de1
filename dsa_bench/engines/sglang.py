"""SGLang: its model with random weights, and its engine.

SGLang runs the model in a process that it starts itself. What that process runs is a function of this module, which
puts the benchmark's parts in place and then calls SGLang's own function.
"""

import functools
import json
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from sglang.srt.entrypoints import engine
from sglang.srt.managers import scheduler
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.model_loader import loader

from dsa_bench.engines import weights
from dsa_bench.engines.trace import Trace

GIB = 1 << 30
GRAPHS = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128]  # sequences of a decoding batch
PREFILL_GRAPHS = [512, 1024, 2048, 4096, 8192]  # tokens of a batch of prompts


@contextmanager
def sharing_parameters() -> Iterator[None]:
    """Large parameters of equal names and shapes that are made meanwhile are one tensor."""
    first: dict[tuple[Any, ...], torch.Tensor] = {}
    register = torch.nn.Module.register_parameter

    def shared(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None and parameter.nbytes >= weights.LARGE and parameter.dim() == 3:
            parameter.data = first.setdefault((name, parameter.shape, parameter.dtype), parameter.data)
        register(module, name, parameter)

    torch.nn.Module.register_parameter = shared
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register


def fill(model: torch.nn.Module) -> None:
    """What SGLang calls for its load format "dummy": random weights, also shared once SGLang has prepared them."""
    generator = torch.Generator("cuda").manual_seed(1)
    for name, values in model.named_parameters():
        if values.dim():  # others are scales of caches, which SGLang has set to 1
            weights.fill(name, values.data, generator)
    prepared: dict[tuple[Any, ...], torch.nn.Module] = {}
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        large = tuple((n, p.shape) for n, p in module.named_parameters(recurse=False) if p.nbytes >= weights.LARGE)
        if large and hasattr(method, "process_weights_after_loading"):
            method.process_weights_after_loading = _sharing(
                method.process_weights_after_loading, prepared, (type(module), large)
            )


def _sharing(prepare: Callable[[Any], None], prepared: dict[Any, torch.nn.Module], key: Any) -> Callable[[Any], None]:
    """SGLang's preparation of a layer's weights, after which the layer has the first such layer's weights."""

    @functools.wraps(prepare)
    def shared(module: torch.nn.Module) -> None:
        prepare(module)
        first = prepared.setdefault(key, module)
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.nbytes >= weights.LARGE:
                parameter.data = getattr(first, name).data

    return shared


class Scheduler(Trace, scheduler.Scheduler):
    """SGLang's scheduler, which holds the model, and what the benchmark asks of it."""

    def peak_gib(self) -> float:
        """The most memory that torch had allocated since the last call."""
        peak = torch.cuda.max_memory_allocated() / GIB
        torch.cuda.reset_peak_memory_stats()
        return peak

    def answer(self, method: str, path: str) -> None:
        """Call a method and leave its result in a file: SGLang returns no results of such calls."""
        Path(path).write_text(json.dumps(getattr(self, method)()))


def run_scheduler(cache_gib: int, *args: Any, **kwargs: Any) -> None:
    """What SGLang's process of the model runs."""
    profile = KVCacheConfigurator._profile_available_bytes
    loader._initialize_model = sharing_parameters()(loader._initialize_model)
    loader.initialize_dummy_weights = fill
    KVCacheConfigurator._profile_available_bytes = lambda *args: min(profile(*args), cache_gib * GIB)
    scheduler.Scheduler = Scheduler
    scheduler.run_scheduler_process(*args, **kwargs)


class Server(engine.Engine):
    """SGLang's engine, whose process of the model runs `run_scheduler`."""

    def __init__(self, cache_gib: int, **arguments: Any) -> None:
        self.run_scheduler_process_func = functools.partial(run_scheduler, cache_gib)
        super().__init__(**arguments)


class Engine:
    """DSA_BENCH_SGLANG: JSON of arguments of SGLang's server that replace or join those below."""

    def __init__(self, model: str, vocabulary: int, cache_gib: int) -> None:
        self.vocabulary = vocabulary
        arguments = {
            "model_path": model,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "grammar_backend": "none",
            "kv_cache_dtype": "fp8_e4m3",
            "context_length": 40960,
            "max_running_requests": 128,
            "max_prefill_tokens": 8192,
            "chunked_prefill_size": 8192,
            "mem_fraction_static": 0.6,
            "cuda_graph_bs_decode": GRAPHS,
            "cuda_graph_bs_prefill": PREFILL_GRAPHS,
            "incremental_streaming_output": True,
            "log_level": "info",
        }
        self._engine = Server(cache_gib, **arguments | json.loads(os.environ.get("DSA_BENCH_SGLANG", "{}")))

    async def stream(self, prompt: Sequence[int], tokens: int) -> AsyncIterator[int]:
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        chunks = await self._engine.async_generate(input_ids=list(prompt), sampling_params=sampling, stream=True)
        async for chunk in chunks:
            if count := len(chunk["output_ids"]):
                yield count

    async def ask(self, method: str) -> Any:
        """Call a method of `Scheduler` in SGLang's process of the model."""
        with tempfile.NamedTemporaryFile() as file:
            self._engine.collective_rpc("answer", method=method, path=file.name)
            return json.loads(Path(file.name).read_text())

    def close(self) -> None:
        self._engine.shutdown()
