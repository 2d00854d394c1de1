"""Text generation for requests that start and end while other requests run."""

import contextlib
import hashlib
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from dsa_layers.arguments import integer, shown
from dsa_layers.cache.cache import Cache, OutOfPages
from dsa_layers.generation.engine_options import checked_options
from dsa_layers.generation.requests import (
    Request,
    RunningSequence,
    StopStrings,
    Throughput,
    TokenEvent,
    check_stop_strings,
    encode_prompt,
)
from dsa_layers.generation.sampling import SamplingParams, with_seed
from dsa_layers.generation.sequence_memory import Capacity, SequenceMemory
from dsa_layers.generation.steps import Passes, powers_of_two
from dsa_layers.io.tokenizer import Tokenizer
from dsa_layers.models.protocols import Model
from dsa_layers.parallel.process_group import agreed, gathered, raise_on_all_ranks
from dsa_layers.parallel.ranks import ALONE, Ranks

_LOGGER = logging.getLogger(__name__)
GREEDY = SamplingParams()
Prompt = tuple[str, list[int], SamplingParams]  # its name in errors, its tokens, and how to continue it


class Scheduler:
    """Base class of `Engine` and `Generator`: it schedules requests and runs a model's passes for them.

    model      a `Model`, such as load_model returns, on the device that runs it
    tokenizer  a tokenizer for text prompts, text in events and stop strings; None: token ids only
    options    fields of `EngineOptions`

    Sequences start first come first served. A sequence starts if the cache has room for its prompt and all its new
    tokens, so no sequence is ever evicted. Passes over chunks of prompts (prefill) alternate with passes that extend
    all other sequences (decode).

    Any thread may call these methods at any time. Passes run one at a time. If a pass raises an exception, the requests
    that it computes end. `step` raises the exception, and the streams of these requests raise it too.

    If a model is split over ranks (load_model's mesh), one thread of each rank must make the same calls in the same
    order, and must close streams instead of dropping them. Requests that differ between ranks are refused. Rank 0
    chooses the seeds that callers do not set. If a pass fails on one rank, the other ranks wait for that rank, and the
    launcher must end them.
    """

    def __init__(self, model: Model, tokenizer: Tokenizer | None = None, **options: Any) -> None:
        if not isinstance(model, Model):
            raise TypeError(f"model: must be a model as load_model returns it, got {type(model).__name__}")
        self.model, self.tokenizer = model, tokenizer
        self.device = next(model.parameters()).device
        self.ranks: Ranks = getattr(model, "ranks", ALONE)
        self.eos = set(model.config.eos_token_ids)
        with raise_on_all_ranks(self.ranks) as facts:
            if tokenizer is not None and not (hasattr(tokenizer, "encode") and hasattr(tokenizer, "stream")):
                raise TypeError(f"tokenizer: must be a dsa_layers.Tokenizer or None, got {type(tokenizer).__name__}")
            self.options = checked_options(model, options)
            self.prefill_chunk = self.options.prefill_chunk
            if tokenizer is not None and tokenizer.eos_token_id is not None:
                self.eos.add(tokenizer.eos_token_id)
            facts |= {name: str(value) for name, value in asdict(self.options).items()}
            facts["tokens that end"] = str(sorted(self.eos))
        with raise_on_all_ranks(self.ranks):
            self.capacity = Capacity(model, self.options, self.device)
        self.capacity.pages = min(gathered(self.ranks, self.capacity.pages))
        # Create the cache outside of inference mode, because callers may write to it outside of inference mode.
        with raise_on_all_ranks(self.ranks), torch.inference_mode(False):
            self.cache: Cache = self.capacity.make_cache(model, self.device)
            self.passes = Passes(model, self.cache, self.options)
        if self.options.cache_tokens is None and self.device.type == "cuda" and self.ranks.rank == 0:
            _LOGGER.info("The cache holds %d tokens.", self.capacity.pages * self.options.page_size)
        self.memory = SequenceMemory(self.passes.caches, self.capacity, self.options)
        self.throughput = Throughput()
        self._waiting: list[RunningSequence] = []
        self._running: list[RunningSequence] = []
        self._ended: deque[Request] = deque(maxlen=self.options.max_sequences)  # `Engine.stream` accepts them
        self._numbers = 0
        self._full = False  # the first waiting sequence found no room, and no memory was released since then
        self._extends_next = False
        # Guards the fields above and the requests' events. While one thread runs a pass, other threads change none of
        # the lists, except that they may append to `_waiting`.
        self._changed = threading.Condition()
        self._worker: int | None = None  # the identifier of the thread that runs a pass

    @property
    def unfinished(self) -> int:
        """The number of sequences that are waiting or running."""
        return len({s for s in [*self._waiting, *self._running] if not s.ended})

    def add_request(self, prompt: str | Sequence[int], params: SamplingParams = GREEDY) -> int:
        """Add a request and return its number, which is also `TokenEvent.sequence` of its first sequence. If
        `params.n` is above 1, the other sequences have the numbers that follow. With a seed, sequence k of the request
        uses seed + k.

        Raise TypeError or ValueError if the prompt or `params` has a wrong type, if the prompt is empty, if a token is
        outside the vocabulary, if a text is not Unicode, or if the prompt fills the model's context. Raise OutOfPages
        if the whole cache cannot hold a sequence.
        """
        return self._submit(lambda: [self._checked(prompt, params)]).number

    def abort(self, request: int) -> None:
        """End a request. It has no further events, not even one with a finish_reason. The engine frees its memory as
        soon as no pass is running. Do nothing if the request has already ended."""
        with self._changed:
            found = self._known_request(request)
            if found is not None:
                found.end()
                found.events.clear()
            if self._worker is None:
                self._release_ended()
            self._changed.notify_all()

    def step(self) -> list[TokenEvent]:
        """Run a pass and return its events, in the order in which the sequences started; [] if nothing is unfinished.

        If the logits of a sequence are not finite, it ends with finish_reason "error", and the other sequences
        continue.
        """
        with self._turn():
            return self._step()

    def warm_up(self, max_tokens: int | None = None) -> None:
        """Capture the CUDA graphs of decoding passes before requests arrive. Otherwise the first pass of each size is
        captured while its sequences wait.

        There is one graph per size of a pass: a number of sequences, up to max_sequences, and a number of pages of the
        longest sequence, each rounded up to a power of two. Do nothing if passes are not captured.

        max_tokens  the most tokens of a sequence, which bounds the number of pages. None: the model's context, or the
                    number of tokens that the cache holds if that is less

        Raise TypeError or ValueError if max_tokens is wrong, and RuntimeError if a request is unfinished.
        """
        room = self.capacity.pages * self.options.page_size - self.options.draft_tokens
        tokens = min(self.capacity.context, room)
        if max_tokens is not None:
            tokens = integer("max_tokens", max_tokens, at_least=1, at_most=tokens)
        with self._turn():
            if self.unfinished:
                raise RuntimeError(f"warm_up: must be called while no request runs, got {self.unfinished} unfinished")
            # Capture the largest graph first, because the other graphs fit into its memory.
            for pages in powers_of_two(self.capacity.of(tokens)):
                for count in powers_of_two(self.capacity.sequences):
                    self.passes.warm_up(count, pages)

    # Requests.

    def _known_request(self, number: int) -> Request | None:
        """Return the request with this number, if it is unfinished or has ended recently; None otherwise."""
        unfinished = [s.request for s in [*self._waiting, *self._running]]
        return next((request for request in [*unfinished, *self._ended] if request.number == number), None)

    def _checked(self, prompt: Any, params: Any) -> Prompt:
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params: must be SamplingParams, got {shown(params)}")
        return "prompt", encode_prompt("prompt", prompt, self.tokenizer, self.model.config.vocab_size), params

    def _submit(self, make: Callable[[], Iterable[Prompt]]) -> Request:
        """Add the sequences of one or more prompts as one request, and return the request.

        make  a function that returns the prompts. If it raises on one rank, all ranks raise
        """
        with raise_on_all_ranks(self.ranks) as facts:
            sequences = [s for i, prompt in enumerate(make()) for s in self._sequences(i, *prompt)]
            if self.ranks.size > 1:
                facts["prompts"] = _digest([s.tokens for s in sequences])
                facts["params"] = _digest([s.params for s in sequences])
        seeds = [random.SystemRandom().getrandbits(63) for _ in sequences]
        if self.ranks.size > 1:
            seeds = agreed(self.ranks, lambda: seeds)
        with self._changed:
            request = Request(self._numbers, sequences)
            self._numbers += len(sequences)
            for k, (s, seed) in enumerate(zip(sequences, seeds)):
                s.request, s.index = request, request.number + k
                s.seed = seed if s.params.seed is None else s.params.seed
            self._waiting += sequences
        return request

    def _sequences(self, index: int, name: str, tokens: list[int], params: SamplingParams) -> Iterator[RunningSequence]:
        """Yield the `params.n` sequences of a prompt. Raise ValueError or OutOfPages as `add_request` does."""
        vocab_size, capacity = self.model.config.vocab_size, self.capacity
        if len(tokens) >= capacity.context:
            raise ValueError(f"{name}: has {len(tokens)} tokens; the model's context holds {capacity.context}")
        if (params.logprobs or 0) > vocab_size:
            raise ValueError(f"logprobs: must be at most the vocabulary of {vocab_size}, got {params.logprobs}")
        check_stop_strings(params.stop, self.tokenizer)
        limit = min(len(tokens) + params.max_tokens, capacity.context)
        if capacity.of(limit) > capacity.pages:
            raise OutOfPages(
                f"{name}: {len(tokens)} prompt tokens and {limit - len(tokens)} new ones need {capacity.of(limit)} "
                f"pages of {self.options.page_size} tokens with {self.options.draft_tokens} drafts; the cache has "
                f"{capacity.pages} (cache_tokens)"
            )
        for k in range(params.n):
            text = StopStrings(self.tokenizer.stream() if self.tokenizer else None, params.stop)
            yield RunningSequence(name, index, list(tokens), with_seed(params, k), limit, text, self.eos)

    # Passes.

    @contextlib.contextmanager
    def _turn(self, request: Request | None = None) -> Iterator[bool]:
        """Wait until no other thread runs a pass. Then yield True: the caller may run a pass inside the context. With a
        request, yield False as soon as the request needs no pass, because it has an event to return or has ended."""

        def needs_a_pass() -> bool:
            return request is None or not (request.events or request.ended)

        with self._changed:
            if self._worker == threading.get_ident():  # waiting would be a deadlock
                raise RuntimeError("step: was called by the pass of another step, as a hook may do")
            self._changed.wait_for(lambda: self._worker is None or not needs_a_pass())
            mine = needs_a_pass()
            if mine:
                self._worker = threading.get_ident()
                self._release_ended()
        try:
            yield mine
        finally:
            if mine:
                with self._changed:
                    self._release_ended()
                    self._worker = None
                    self._changed.notify_all()

    @torch.inference_mode()
    def _step(self) -> list[TokenEvent]:
        ready = [s for s in self._running if not s.prefilling]
        work = []
        if not (self._extends_next and ready):
            self._start_waiting()
            work = self._prefill_work()
        self._extends_next = bool(work)
        try:
            events = self._prefill(work) if work else self._extend(ready)
        except BaseException as error:  # the pass may have added tokens to sequences, and their events are lost
            self._fail({s.request for s in [s for s, _ in work] or ready}, error)
            raise
        return self._delivered(events)

    def _start_waiting(self) -> None:
        """Start waiting sequences, first come first served, as long as there is room for the next sequence."""
        while self._waiting and not self._full:
            first = self._waiting[0]
            if not first.ended:
                if not self.memory.start(first, self._running):
                    self._full = True
                    return
                self._running.append(first)
                self.throughput.reused_tokens += first.cached
            self._waiting.pop(0)

    def _prefill_work(self) -> list[tuple[RunningSequence, int]]:
        """Choose the prompt tokens of the next pass: (sequence, number of tokens) pairs, first come first served, with
        at most `prefill_chunk` tokens in total. A batch-invariant engine computes one prompt per pass."""
        work, room = [], self.options.prefill_chunk
        for s in self._running:
            n = min(self.memory.next_stop(s) - s.cached, room)
            if n > 0:
                work.append((s, n))
                room = 0 if self.options.batch_invariant else room - n
        return work

    def _prefill(self, work: Sequence[tuple[RunningSequence, int]]) -> list[TokenEvent]:
        started = time.perf_counter()
        events = self.passes.prefill(work)
        for s, _ in work:
            self.memory.computed(s)
        self._full = False  # a waiting sequence may be able to share the new pages
        if self.device.type == "cuda" and not all(s.prefilling for s in self._running):
            # Without this synchronisation, the next decoding pass would wait for this pass and count its time.
            torch.cuda.current_stream(self.device).synchronize()
        self.throughput.prefill_tokens += sum(n for _, n in work)
        self.throughput.prefill_seconds += time.perf_counter() - started
        return events

    def _extend(self, ready: Sequence[RunningSequence]) -> list[TokenEvent]:
        if not ready:
            return []
        started = time.perf_counter()
        events = self.passes.extend(ready, self.throughput)
        self.throughput.decode_tokens += sum(event.token is not None for event in events)
        self.throughput.decode_seconds += time.perf_counter() - started
        return events

    def _delivered(self, events: Sequence[TokenEvent]) -> list[TokenEvent]:
        """Add events to the streams of their requests, and return them. Drop the events of aborted requests."""
        kept, by_index = [], {s.index: s for s in self._running}
        with self._changed:
            for event in events:
                s = by_index[event.sequence]
                if not s.ended:
                    kept.append(event)
                    s.ended = event.finish_reason is not None
                    s.request.events.append(event)
        return kept

    def _fail(self, requests: set[Request], error: BaseException) -> None:
        """End the requests that a failed pass has computed. Their streams raise the error of the pass."""
        with self._changed:
            for request in requests:
                request.end()
                if isinstance(error, Exception):
                    request.events.append(error)

    def _release_ended(self) -> None:
        """Release the memory of sequences that have ended. No pass may be running."""
        for s in [s for s in self._running if s.ended]:
            self._running.remove(s)
            self.memory.release(s)
            if s.request.ended:
                self._ended.append(s.request)
            self._full = False


class Engine(Scheduler):
    """Generate text for requests that start and end while other requests run.

        engine = Engine(load_model(checkpoint), Tokenizer(checkpoint))
        first = engine.add_request("def merge(left, right):", SamplingParams(max_tokens=64))
        while engine.unfinished:
            for event in engine.step():
                print(event.sequence == first, event.text)

    `Scheduler` documents the arguments and how requests share passes.
    """

    def stream(self, request: int) -> "EventStream":
        """Return the stream of a request, with all its events. Create at most one stream per request.

        The request must be unfinished or one of the last `max_sequences` requests that have ended. Ended requests are
        accepted because another thread may finish a request before this call. Raise ValueError for other requests.
        """
        with self._changed:
            found = self._known_request(request)
        if found is None:
            raise ValueError(f"request: must be unfinished or have ended lately, got {shown(request)}")
        return EventStream(self, found)


class EventStream(Iterator[TokenEvent]):
    """The events of a request, in the order in which their tokens are computed. Reading an event runs passes, and these
    serve all requests of the engine. Any thread may read or close the stream.

    request  the number of the request
    """

    def __init__(
        self, engine: Scheduler, request: Request, before_pass: Callable[[], None] | None = None, first: int = 0
    ) -> None:
        """
        before_pass  a function that this stream calls before each pass that it runs
        first        a number that is subtracted from each event's `sequence`
        """
        self._engine, self._request, self._before_pass, self._first = engine, request, before_pass, first
        self.request = request.number

    def __next__(self) -> TokenEvent:
        engine, request = self._engine, self._request
        while True:
            with engine._turn(request) as mine:
                if mine:
                    self._run_pass()
            with engine._changed:
                if request.events:
                    event = request.events.popleft()
                    if isinstance(event, Exception):
                        raise event
                    return replace(event, sequence=event.sequence - self._first)
                if request.ended:
                    raise StopIteration

    def _run_pass(self) -> None:
        if self._before_pass is not None:
            self._before_pass()
        try:
            self._engine._step()
        except Exception as error:
            if not self._request.ended:
                _LOGGER.error("A pass that computed other requests failed.", exc_info=error)

    def close(self) -> None:
        """End the request. Dropping the last reference to the stream also ends the request. In that case, the engine
        releases the request's memory before the next pass."""
        self._engine.abort(self.request)

    def __del__(self) -> None:
        # This method takes no lock, because the garbage collector may call it at any point.
        self._request.end()


def _digest(values: list) -> str:
    return f"ones of digest {hashlib.sha256(repr(values).encode()).hexdigest()[:12]}"
