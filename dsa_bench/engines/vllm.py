"""vLLM: its model with random weights, and its server's engine."""

import functools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from dsa_bench.engines import weights
from dsa_bench.engines.trace import Trace

GIB = 1 << 30


@register_model_loader("random")
class RandomLoader(DummyModelLoader):
    """Load random weights; large parameters of equal shapes are one tensor."""

    def create_model(self, *args: Any, **kwargs: Any) -> torch.nn.Module:
        first: dict[tuple[Any, ...], torch.Tensor] = {}
        register = torch.nn.Module.register_parameter

        def shared(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
            if parameter is not None and parameter.nbytes >= weights.LARGE and parameter.dim() == 3:
                parameter.data = first.setdefault((name, parameter.shape, parameter.dtype), parameter.data)
            register(module, name, parameter)

        torch.nn.Module.register_parameter = shared
        try:
            return super().create_model(*args, **kwargs)
        finally:
            torch.nn.Module.register_parameter = register

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        generator = torch.Generator("cuda").manual_seed(1)
        for name, values in model.named_parameters():
            weights.fill(name, values.data, generator)
        processed: dict[tuple[Any, ...], torch.nn.Module] = {}
        for module in model.modules():
            method = getattr(module, "quant_method", None)
            large = tuple((n, p.shape) for n, p in module.named_parameters(recurse=False) if p.nbytes >= weights.LARGE)
            if large and hasattr(method, "process_weights_after_loading"):
                method.process_weights_after_loading = _sharing(
                    method.process_weights_after_loading, processed, (type(module), large)
                )


def _sharing(process: Callable[[Any], None], processed: dict[Any, torch.nn.Module], key: Any) -> Callable[[Any], None]:
    """The engine's preparation of a layer's weights, after which the layer has the first such layer's weights."""

    @functools.wraps(process)
    def shared(module: torch.nn.Module) -> None:
        process(module)
        first = processed.setdefault(key, module)
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.nbytes >= weights.LARGE:
                parameter.data = getattr(first, name).data

    return shared


class Worker(Trace):
    """What the benchmark asks of vLLM's worker process."""

    def peak_gib(self) -> float:
        """The most memory that torch had allocated since the last call."""
        peak = torch.cuda.max_memory_allocated() / GIB
        torch.cuda.reset_peak_memory_stats()
        return peak


class Engine:
    def __init__(self, model: str, vocabulary: int, cache_gib: int, options: dict[str, Any]) -> None:
        """options: of vLLM, in the place of those here."""
        self.vocabulary = vocabulary
        of_server = {
            "load_format": "random",
            "skip_tokenizer_init": True,
            "kv_cache_dtype": "fp8",
            "max_model_len": 40960,
            "max_num_seqs": 128,
            "max_num_batched_tokens": 8192,
            "gpu_memory_utilization": 0.44,
            "kv_cache_memory_bytes": cache_gib * GIB,
            "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128]},
            # Compiles for every number of tokens, for minutes. The loads' first runs compile what they need.
            "kernel_config": {"enable_jit_warmup": False},
            "worker_extension_cls": "dsa_bench.engines.vllm.Worker",
            "disable_log_stats": True,
        }
        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, **(of_server | options)))
        self._requests = 0

    async def stream(self, prompt: Sequence[int], tokens: int) -> AsyncIterator[int]:
        sampling = SamplingParams(
            max_tokens=tokens,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._requests += 1
        prompt = {"prompt_token_ids": list(prompt)}
        async for output in self._engine.generate(prompt, sampling, request_id=str(self._requests)):
            if count := len(output.outputs[0].token_ids):
                yield count

    async def answer(self, prompt: Sequence[int], tokens: int, logprobs: bool) -> dict[str, Any]:
        sampling = SamplingParams(
            max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False, prompt_logprobs=0 if logprobs else None
        )
        self._requests += 1
        prompt = {"prompt_token_ids": list(prompt)}
        async for output in self._engine.generate(prompt, sampling, request_id=str(self._requests)):
            final = output
        known = zip(final.prompt_logprobs[1:], prompt["prompt_token_ids"][1:], strict=True) if logprobs else ()
        found = [of_token[token].logprob for of_token, token in known]
        return {"logprobs": found, "tokens": list(final.outputs[0].token_ids)}

    async def ask(self, method: str) -> Any:
        """Call a method of the worker process."""
        return (await self._engine.collective_rpc(method))[0]

    def close(self) -> None:
        self._engine.shutdown()
