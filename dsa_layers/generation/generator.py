"""Text generation for a list of prompts that is complete when it begins."""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Unpack

import torch

from dsa_layers.arguments import shown
from dsa_layers.cache.cache import Cache
from dsa_layers.families.model import Model
from dsa_layers.generation.engine import GREEDY, Engine
from dsa_layers.generation.engine_options import EngineOptions
from dsa_layers.generation.prompts import encode_prompts
from dsa_layers.generation.results import Completion, Throughput, TokenEvent
from dsa_layers.generation.running_sequence import RunningSequence
from dsa_layers.generation.sampling import SamplingParams, with_seed
from dsa_layers.generation.token_stream import TokenStream
from dsa_layers.io.tokenizer import Tokenizer


class Generator:
    """Continues prompts with a model. A client of an `Engine`.

    model      on the device to run on: load_model's, or anything else that is a Model
    tokenizer  for text prompts, streamed text and stop strings; None works on token ids alone
    options    `EngineOptions`

    One call of `generate` or `stream` runs at a time. Another one, of whatever thread, is refused with a RuntimeError
    until the first has ended: it cannot wait, since a stream goes on only when its reader asks for the next event, and
    that reader may be the very thread that would wait. `close_stream` ends a stream that nobody reads any more.
    Threads that share a generator take turns by a lock of their own, or send their prompts in one call; requests that
    come at any time are an `Engine`'s.

    Of a model that several ranks have parts of (load_model's mesh), all ranks make the same calls (`Engine`).
    """

    def __init__(self, model: Model, tokenizer: Tokenizer | None = None, **options: Unpack[EngineOptions]) -> None:
        self.engine = Engine(model, tokenizer, **options)
        self.model, self.tokenizer, self.device = self.engine.model, tokenizer, self.engine.device
        self.prefill_chunk = self.engine.prefill_chunk
        self._lock = threading.Lock()
        self._stream: weakref.ref[TokenStream] | None = None

    @property
    def cache(self) -> Cache:
        return self.engine.cache

    @property
    def throughput(self) -> Throughput:
        """Of the last call."""
        return self.engine.throughput

    def warm_up(self, batch_sizes: Sequence[int] | None = None, *, max_tokens: int | None = None) -> None:
        """`Engine.warm_up`. Raises RuntimeError while a stream is open."""
        with self._lock:
            self._check_no_stream()
            self.engine.warm_up(batch_sizes, max_tokens=max_tokens)

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] = GREEDY,
        *,
        on_event: Callable[[TokenEvent], None] | None = None,
    ) -> list[Completion]:
        """Completions of all prompts, in their order, and of each prompt SamplingParams.n of them. prompts, params: as
        for `stream`."""
        sequences = self._sequences(prompts, params)
        completions = [Completion(s.prompt_len, prompt=s.prompt_index) for s in sequences]
        with contextlib.closing(TokenStream(lambda stream: self._begin(stream, sequences))) as events:
            for event in events:
                completions[event.sequence].add(event)
                if on_event is not None:
                    on_event(event)
        return completions

    def stream(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] = GREEDY,
        *,
        on_prefill: Callable[[int, int], None] | None = None,
    ) -> TokenStream:
        """Events as tokens come. prompts: a text, or a list of texts or of lists, arrays or tensors of token ids;
        params: for all, or one a prompt. With a seed for all, sequence i uses seed + i: equal prompts have texts of
        their own. With a seed for one prompt, its k-th sequence uses seed + k.

        on_prefill(done, total) is called before each pass over prompts, with the numbers of their tokens in the cache
        and of all. A sequence whose logits are not finite ends with finish_reason "error"; the others go on.

        Raises, before it returns, what `Engine.add_request` raises, for any of the prompts. The first event raises
        RuntimeError while another stream of this generator is open; it may be asked for again once that one has ended.
        """
        sequences = self._sequences(prompts, params)
        return TokenStream(lambda stream: self._begin(stream, sequences, on_prefill))

    def _sequences(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
    ) -> list[RunningSequence]:
        with self.engine.requests.agreed() as sequences:
            encoded = encode_prompts(prompts, self.tokenizer, self.model.config.vocab_size)
            if isinstance(params, SamplingParams):
                params = [with_seed(params, i * params.n) for i in range(len(encoded))]
            if not isinstance(params, Sequence) or any(not isinstance(one, SamplingParams) for one in params):
                raise TypeError(f"params: must be SamplingParams, or a list of them, got {shown(params)}")
            if len(params) != len(encoded):
                raise ValueError(
                    f"params: must be one for all prompts or one for each of {len(encoded)}, got {len(params)}"
                )
            for i, (tokens, one) in enumerate(zip(encoded, params)):
                made = self.engine.requests.sequences(f"prompts[{i}]", tokens, one, len(sequences), prompt_index=i)
                sequences += made
        return sequences

    def close_stream(self) -> None:
        """End the stream that is open, if there is one."""
        stream = self._open_stream()
        if stream is not None:
            stream.close()

    def _open_stream(self) -> TokenStream | None:
        last = self._stream  # read once: another thread may clear it
        stream = None if last is None else last()
        return stream if stream is not None and stream.holds_cache else None

    def _begin(
        self,
        stream: TokenStream,
        sequences: list[RunningSequence],
        on_prefill: Callable[[int, int], None] | None = None,
    ) -> None:
        """Gives the stream its events; it is from now on the open one."""
        with self._lock:
            self._check_no_stream()
            self._stream = weakref.ref(stream)
            stream._events = self._events(sequences, on_prefill)

    def _check_no_stream(self) -> None:
        if self._open_stream() is not None:
            raise RuntimeError(
                "stream: another stream of this generator is open and holds the cache; read it to its end or close "
                "it first (Generator.close_stream())"
            )

    @torch.inference_mode()
    def _events(
        self, sequences: list[RunningSequence], on_prefill: Callable[[int, int], None] | None
    ) -> Iterator[TokenEvent]:
        engine, left, total = self.engine, len(sequences), sum(s.prompt_len for s in sequences)
        done = engine.throughput = Throughput()
        tell = None if on_prefill is None else lambda: on_prefill(done.prefill_tokens + done.reused_tokens, total)
        engine.submit(sequences)
        try:
            while left:
                events = engine.run_pass(tell)
                left -= sum(event.finish_reason is not None for event in events)
                if not left:
                    self._stream = None  # these are its last events, and it holds nothing any more
                yield from events
        finally:
            engine.withdraw(sequences)
