"""vLLM: its model with random weights, and its server's engine."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from dsa_bench.engines import model_process
from dsa_bench.engines.client import LIKELY
from dsa_bench.engines.model_process import GIB


@register_model_loader("random")
class RandomLoader(DummyModelLoader):
    """Load random weights. The routed experts of all layers are one set of weights."""

    def create_model(self, *args: Any, **kwargs: Any) -> torch.nn.Module:
        with model_process.sharing_parameters():
            return super().create_model(*args, **kwargs)

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        model_process.fill(model)


class Worker(model_process.Measured):
    """What the benchmark asks of vLLM's worker process."""


class Engine:
    def __init__(self, model: str, vocabulary: int, cache_gib: int, options: dict[str, Any]) -> None:
        """options: override the defaults below."""
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
            max_tokens=tokens,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            prompt_logprobs=0 if logprobs else None,
            logprobs=LIKELY,
        )
        self._requests += 1
        prompt = {"prompt_token_ids": list(prompt)}
        async for output in self._engine.generate(prompt, sampling, request_id=str(self._requests)):
            final = output
        known = zip(final.prompt_logprobs[1:], prompt["prompt_token_ids"][1:], strict=True) if logprobs else ()
        found = [of_token[token].logprob for of_token, token in known]
        (generated,) = final.outputs
        likely = [[(token, each.logprob) for token, each in of_token.items()] for of_token in generated.logprobs]
        return {"logprobs": found, "tokens": list(generated.token_ids), "likely": likely}

    async def ask(self, method: str) -> Any:
        """Call a method of the worker process."""
        return (await self._engine.collective_rpc(method))[0]

    def close(self) -> None:
        self._engine.shutdown()
