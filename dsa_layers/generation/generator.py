"""Text generation for a list of prompts."""

import contextlib
from collections.abc import Callable, Sequence

from dsa_layers.arguments import shown
from dsa_layers.generation.engine import GREEDY, EventStream, Prompt, Scheduler
from dsa_layers.generation.requests import Completion, Request, Throughput, TokenEvent, encode_prompts
from dsa_layers.generation.sampling import SamplingParams, with_seed

Prompts = str | Sequence[str | Sequence[int]]


class Generator(Scheduler):
    """Continue lists of prompts with a model. `generate` returns the completions; `stream` returns an iterator over
    events.

    model       on the device to run on: what load_model returns, or another Model
    tokenizer   for text prompts, streamed text and stop strings; None: token ids only
    options     fields of `EngineOptions`
    throughput  of all passes since the last call of `generate` or `stream`

    Passes are shared between calls of several threads, and between a call and streams that are open.

    If a model is split over ranks (load_model's mesh), all ranks make the same calls (`Scheduler`).
    """

    def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] = GREEDY,
        *,
        on_event: Callable[[TokenEvent], None] | None = None,
    ) -> list[Completion]:
        """Return the completions of all prompts in their order, SamplingParams.n for each. prompts, params: as for
        `stream`."""
        request = self._call(prompts, params)
        completions = [Completion(s.prompt_len, prompt=s.prompt) for s in request.sequences]
        with contextlib.closing(EventStream(self, request, first=request.number)) as events:
            for event in events:
                completions[event.sequence].add(event)
                if on_event is not None:
                    on_event(event)
        return completions

    def stream(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] = GREEDY,
        *,
        on_prefill: Callable[[int, int], None] | None = None,
    ) -> EventStream:
        """Return an iterator over events as tokens come.

        prompts     a text, or a list of texts or of lists, arrays or tensors of token ids
        params      for all prompts, or a list with one per prompt. With a seed for all, sequence i uses seed + i, so
                    equal prompts get different texts. With a seed for one prompt, its k-th sequence uses seed + k
        on_prefill  on_prefill(done, total) is called before each pass until all prompts are computed. done: prompt
                    tokens in the cache; total: all prompt tokens

        A sequence whose logits are not finite ends with finish_reason "error"; the others go on. Raises what
        `Engine.add_request` raises for any of the prompts, before the iterator is returned.
        """
        request = self._call(prompts, params)
        total = sum(s.prompt_len for s in request.sequences)

        def tell() -> None:
            done = sum(min(s.cached, s.prompt_len) for s in request.sequences)
            if done < total:
                on_prefill(done, total)

        return EventStream(self, request, tell if on_prefill is not None else None, first=request.number)

    def _call(self, prompts: Prompts, params: SamplingParams | Sequence[SamplingParams]) -> Request:
        request = self._submit(lambda: self._all_checked(prompts, params))
        self.throughput = Throughput()
        return request

    def _all_checked(self, prompts: Prompts, params: SamplingParams | Sequence[SamplingParams]) -> list[Prompt]:
        encoded = encode_prompts(prompts, self.tokenizer, self.model.config.vocab_size)
        if isinstance(params, SamplingParams):
            params = [with_seed(params, i * params.n) for i in range(len(encoded))]
        if not isinstance(params, Sequence) or any(not isinstance(one, SamplingParams) for one in params):
            raise TypeError(f"params: must be SamplingParams, or a list of them, got {shown(params)}")
        if len(params) != len(encoded):
            raise ValueError(
                f"params: must be one for all prompts or one for each of {len(encoded)}, got {len(params)}"
            )
        return [(f"prompts[{i}]", tokens, one) for i, (tokens, one) in enumerate(zip(encoded, params))]
