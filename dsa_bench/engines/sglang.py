"""SGLang: its model with random weights, and its engine.

SGLang runs the model in a process that it starts itself. What that process runs is a function of this module, which
puts the benchmark's parts in place and then calls SGLang's own function.
"""

import functools
import json
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from sglang.srt.entrypoints import engine
from sglang.srt.managers import scheduler
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.model_loader import loader

from dsa_bench.engines.client import LIKELY
from dsa_bench.engines.model_process import GIB, Measured, fill, sharing_parameters

GRAPHS = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128]  # sequences of a decoding batch
PREFILL_GRAPHS = [512, 1024, 2048, 4096, 8192]  # tokens of a batch of prompts


class Scheduler(Measured, scheduler.Scheduler):
    """SGLang's scheduler, which holds the model, and what the benchmark asks of it."""

    def to_file(self, asked: str, path: str) -> None:
        """Call a method and leave its result in a file: SGLang returns no results of such calls."""
        Path(path).write_text(json.dumps(getattr(self, asked)()))


def run_scheduler(cache_gib: int, is_random: bool, *args: Any, **kwargs: Any) -> None:
    """What SGLang's process of the model runs. is_random: whether the model has random weights."""
    profile = KVCacheConfigurator._profile_available_bytes
    KVCacheConfigurator._profile_available_bytes = lambda *args: min(profile(*args), cache_gib * GIB)
    if is_random:
        loader._initialize_model = sharing_parameters()(loader._initialize_model)
        loader.initialize_dummy_weights = fill
    scheduler.Scheduler = Scheduler
    scheduler.run_scheduler_process(*args, **kwargs)


class Server(engine.Engine):
    """SGLang's engine, whose process of the model runs `run_scheduler`."""

    def __init__(self, cache_gib: int, **arguments: Any) -> None:
        is_random = arguments["load_format"] == "dummy"
        self.run_scheduler_process_func = functools.partial(run_scheduler, cache_gib, is_random)
        super().__init__(**arguments)


class Engine:
    def __init__(self, model: str, vocabulary: int, cache_gib: int, options: dict[str, Any]) -> None:
        """options: override the defaults below."""
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
        self._engine = Server(cache_gib, **(arguments | options))

    async def stream(self, prompt: Sequence[int], tokens: int) -> AsyncIterator[int]:
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        chunks = await self._engine.async_generate(input_ids=list(prompt), sampling_params=sampling, stream=True)
        async for chunk in chunks:
            if count := len(chunk["output_ids"]):
                yield count

    async def answer(self, prompt: Sequence[int], tokens: int, logprobs: bool) -> dict[str, Any]:
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        options = {"return_logprob": True, "logprob_start_len": 0 if logprobs else -1, "top_logprobs_num": LIKELY}
        found = await self._engine.async_generate(input_ids=list(prompt), sampling_params=sampling, **options)
        about = found["meta_info"]
        of_prompt = about["input_token_logprobs"][1:] if logprobs else []
        likely = [[(token, logprob) for logprob, token, _ in each] for each in about["output_top_logprobs"]]
        return {"logprobs": [logprob for logprob, *_ in of_prompt], "tokens": found["output_ids"], "likely": likely}

    async def ask(self, method: str) -> Any:
        """Call a method of `Scheduler` in SGLang's process of the model."""
        with tempfile.NamedTemporaryFile() as file:
            self._engine.collective_rpc("to_file", asked=method, path=file.name)
            return json.loads(Path(file.name).read_text())

    def close(self) -> None:
        self._engine.shutdown()
