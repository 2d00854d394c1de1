"""Text generation for a list of prompts."""

import contextlib
from collections.abc import Callable, Sequence

from dsa.runtime.checks import shown
from dsa_layers.generation.engine import GREEDY, EventStream, Prompt, Scheduler
from dsa_layers.generation.requests import Completion, Request, Throughput, TokenEvent, encode_prompts
from dsa_layers.generation.sampling import SamplingParams, with_seed

Prompts = str | Sequence[str | Sequence[int]]


class Generator(Scheduler):
    """Generate text for lists of prompts.

    model       a `Model`, such as load_model returns
    tokenizer   a tokenizer for text prompts, text in results and stop strings; None: token ids only
    options     fields of `EngineOptions`
    throughput  the `Throughput` of all passes since the last call of `generate` or `stream`

    Passes are shared by the calls of all threads and all open streams. If a model is split over ranks (load_model's
    mesh), all ranks must make the same calls (`Scheduler`).
    """

    def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] = GREEDY,
        *,
        on_event: Callable[[TokenEvent], None] | None = None,
    ) -> list[Completion]:
        """Return the completions of all prompts, in the order of the prompts. Each prompt has SamplingParams.n
        completions. `stream` documents `prompts` and `params`.

        on_event  a function that is called with each event after the pass that computes its token
        """
        request = self._call(prompts, params)
        completions = [Completion(s.prompt_len, prompt=s.prompt) for s in request.sequences]
        with contextlib.closing(EventStream(self, request)) as events:
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
        """Return an iterator over events, which yields each event after the pass that computes its token.

        prompts     a text or a list of prompts. A prompt in a list is a text, or a list, an array or a tensor of token
                    ids
        params      one SamplingParams for all prompts, or a list with one per prompt. A prompt has `params.n`
                    sequences. With one SamplingParams for all prompts, sequence i of the call uses seed + i. With a
                    list, sequence k of a prompt uses the prompt's seed + k
        on_prefill  a function that is called as on_prefill(done, total) before each pass that the iterator runs, until
                    all prompts of this call are computed. total: the number of prompt tokens of the call; done: how
                    many of them are in the cache. A prompt counts once for each of its sequences

        If the largest logit of a sequence is NaN or infinite, only this sequence ends, with finish_reason "error".
        Before returning the iterator, raise the errors of `Engine.add_request` for any prompt or `params`.
        """
        request = self._call(prompts, params)

        def tell() -> None:
            done = sum(min(s.cached, s.prompt_len) for s in request.sequences)
            total = sum(s.prompt_len for s in request.sequences)
            if on_prefill is not None and done < total:
                on_prefill(done, total)

        return EventStream(self, request, tell)

    def _call(self, prompts: Prompts, params: SamplingParams | Sequence[SamplingParams]) -> Request:
        request = self._submit(lambda: self._checked(prompts, params), first=0)
        self.throughput = Throughput()
        return request

    def _checked(self, prompts: Prompts, params: SamplingParams | Sequence[SamplingParams]) -> list[Prompt]:
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
