"""Text generation for requests that start and end while other requests run."""

import hashlib
import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from dsa.runtime.checks import integer, shown
from dsa_layers.cache.kv_cache import Cache, OutOfPages
from dsa_layers.generation.engine_options import Capacity, checked_options
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
from dsa_layers.generation.sequence_memory import SequenceMemory
from dsa_layers.generation.steps import Passes, powers_of_two
from dsa_layers.io.tokenizer import Tokenizer
from dsa_layers.models.protocols import Model
from dsa_layers.parallel.ranks import ALONE, Ranks, agreed, gathered, raise_on_all_ranks

_LOGGER = logging.getLogger(__name__)
GREEDY = SamplingParams()
Prompt = tuple[str, list[int], SamplingParams]  # (name of the prompt in errors, its tokens, sampling parameters)


class Scheduler:
    """Base class of `Engine` and `Generator`: it schedules requests and runs a model's passes for them.

    model      a `Model`, such as load_model returns
    tokenizer  a tokenizer for text prompts, text in events and stop strings; None: token ids only
    options    fields of `EngineOptions`

    Sequences start in the order of their requests. A sequence starts if fewer than max_sequences run and the cache has
    room for its prompt, all its new tokens and its drafts, so no sequence is ever evicted. With prefix_cache, it may
    also wait until another sequence has computed pages that both can share. Passes over chunks of prompts (prefill)
    alternate with passes that extend all sequences whose prompts are computed (decode).

    Any thread may call the methods. Passes run one at a time. If a pass raises an exception, the requests in the pass
    end. `step` and the streams of these requests raise the exception.

    If a model is split over ranks (load_model's mesh), one thread of each rank must make the same calls in the same
    order, and must call `close` on streams instead of dropping references to them. Requests that differ between ranks
    are refused. If a pass fails on one rank, the launcher must end the other ranks.
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
            if tokenizer is not None and tokenizer.eos_token_id is not None:
                self.eos.add(tokenizer.eos_token_id)
            self.options = checked_options(model, options)
            self.capacity = Capacity(model, self.options, self.device)
            facts |= {name: str(value) for name, value in asdict(self.options).items()}
            facts["tokens that end"] = str(sorted(self.eos))
        self.capacity.pages = min(gathered(self.ranks, self.capacity.pages))
        # Tensors that are created in inference mode cannot be written outside of it.
        with raise_on_all_ranks(self.ranks), torch.inference_mode(False):
            self.cache: Cache = self.capacity.make_cache(model, self.device)
            self.passes = Passes(model, self.cache, self.options)
        if self.options.cache_tokens is None and self.device.type == "cuda" and self.ranks.rank == 0:
            _LOGGER.info("The cache holds %d tokens.", self.capacity.pages * self.options.page_size)
        self.memory = SequenceMemory(self.passes.caches, self.capacity, self.options)
        self.throughput = Throughput()
        self._requests: dict[int, Request] = {}  # number -> request: all unfinished requests, and some that have ended
        self._waiting: list[RunningSequence] = []
        self._running: list[RunningSequence] = []
        self._numbers = 0
        # The first waiting sequence, if it could not start. Reset to None after a prefill pass or a release of memory.
        self._blocked: RunningSequence | None = None
        self._extends_next = False
        # This lock protects requests and their events. No thread holds it during a pass, so `add_request` and `abort`
        # do not wait for the pass. While a pass runs, only its thread removes sequences from `_waiting` and `_running`.
        self._changed = threading.Condition()
        self._worker: int | None = None  # the identifier of the thread that runs a pass

    @property
    def unfinished(self) -> int:
        """The number of sequences that are waiting or running."""
        with self._changed:
            return sum(not s.ended for request in self._requests.values() for s in request.sequences)

    def add_request(self, prompt: str | Sequence[int], params: SamplingParams = GREEDY) -> int:
        """Add a request of `params.n` sequences. Return its number, which is also `TokenEvent.sequence` of the first
        sequence; the other sequences have the numbers that follow. With a seed, sequence k uses seed + k.

        Raise TypeError or ValueError for a wrong prompt (`encode_prompts`) or wrong `params`, or if the prompt fills
        the model's context. If the whole cache cannot hold a sequence, raise OutOfPages; on several ranks, ValueError.
        """

        def checked() -> list[Prompt]:
            if not isinstance(params, SamplingParams):
                raise TypeError(f"params: must be SamplingParams, got {shown(params)}")
            return [("prompt", encode_prompt("prompt", prompt, self.tokenizer, self.model.config.vocab_size), params)]

        return self._submit(checked).number

    def abort(self, request: int) -> None:
        """End a request, and drop its events that no stream has returned. The request has no further events, not even
        one with a finish_reason. Its memory is freed as soon as no pass is running. Ignore an unknown request."""
        with self._changed:
            if request in self._requests:
                self._requests[request].end()
                self._requests[request].events.clear()
            if self._worker is None:
                self._release_ended()

    def step(self) -> list[TokenEvent]:
        """Run a pass and return its events, in the order in which sequences started. A pass may have no events, for
        example if no prompt ends in it. If no request is unfinished, return [] without a pass.

        If the largest logit of a sequence is NaN or infinite, only this sequence ends, with finish_reason "error".
        """
        return self._alone(self._pass)

    def warm_up(self, max_tokens: int | None = None) -> None:
        """Capture the CUDA graphs of decoding passes before requests arrive, for all sizes of a pass
        (`EngineOptions.cuda_graphs`). Without a warm-up, the first pass of each size is captured while its sequences
        wait. Do nothing if passes are not captured.

        max_tokens  the largest number of tokens per sequence. Default and maximum: the model's context, or the number
                    of tokens that fit into the cache together with a sequence's drafts, if that is less

        Raise TypeError or ValueError if max_tokens is wrong, and RuntimeError if a request is unfinished.
        """
        room = self.capacity.pages * self.options.page_size - self.options.draft_tokens
        tokens = min(self.capacity.context, room)
        if max_tokens is not None:
            tokens = integer("max_tokens", max_tokens, at_least=1, at_most=tokens)

        def capture() -> list[TokenEvent]:
            if self.unfinished:
                raise RuntimeError(f"warm_up: must be called while no request runs, got {self.unfinished} unfinished")
            # Capture the largest graph first, because the other graphs fit into its memory.
            for pages in powers_of_two(self.capacity.of(tokens)):
                for count in powers_of_two(self.capacity.sequences):
                    self.passes.warm_up(count, pages)
            return []

        self._alone(capture)

    def _submit(self, make: Callable[[], Iterable[Prompt]], first: int | None = None) -> Request:
        """Add the sequences of prompts as one request, and return the request.

        make   a function that returns the prompts. If it raises on one rank, all ranks raise
        first  `TokenEvent.sequence` of the first sequence; None: the number of the request
        """
        with raise_on_all_ranks(self.ranks) as facts:
            sequences = [s for i, prompt in enumerate(make()) for s in self._sequences(i, *prompt)]
            if self.ranks.size > 1:
                facts["prompts"] = _digest([s.tokens for s in sequences])
                facts["params"] = _digest([s.params for s in sequences])
        seed = random.SystemRandom().getrandbits(62)
        if self.ranks.size > 1:
            seed = agreed(self.ranks, lambda: seed)
        with self._changed:
            request = Request(self._numbers, sequences)
            for k, s in enumerate(sequences):
                s.request, s.index = request, k + (request.number if first is None else first)
                s.seed = seed + k if s.params.seed is None else s.params.seed
            ended = [number for number, known in self._requests.items() if known.ended]
            for number in ended[: -self.options.max_sequences]:
                del self._requests[number]
            self._requests[request.number] = request
            self._numbers += max(len(sequences), 1)  # a request without sequences also takes a number
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

    def _alone(
        self, run: Callable[[], list[TokenEvent]], needed: Callable[[], bool] = lambda: True
    ) -> list[TokenEvent]:
        """Wait until no other thread runs a pass, then call `run`, which may run passes, and return its result. If
        `needed` returns False, stop waiting and return []."""
        with self._changed:
            if self._worker == threading.get_ident():  # waiting would be a deadlock
                raise RuntimeError("step: was called by the pass of another step, as a hook may do")
            self._changed.wait_for(lambda: self._worker is None or not needed())
            if not needed():
                return []
            self._worker = threading.get_ident()
            self._release_ended()
        try:
            return run()
        finally:
            with self._changed:
                self._release_ended()
                self._worker = None
                self._changed.notify_all()

    @torch.inference_mode()
    def _pass(self) -> list[TokenEvent]:
        ready = [s for s in self._running if not s.prefilling]
        work = [] if self._extends_next and ready else self._prefill_work()
        self._extends_next = bool(work)
        try:
            events = self._prefill(work) if work else self._extend(ready)
        except BaseException as error:
            # The pass may have added tokens to sequences without returning their events, so these requests cannot
            # continue.
            with self._changed:
                for request in {s.request for s in [s for s, _ in work] or ready}:
                    request.end()
                    if isinstance(error, Exception):
                        request.events.append(error)
            raise
        with self._changed:
            events = [(s, event) for s, event in events if not s.ended]  # aborted requests have no further events
            for s, event in events:
                s.request.events.append(event)
                s.ended |= event.finish_reason is not None
        return [event for _, event in events]

    def _prefill_work(self) -> list[tuple[RunningSequence, int]]:
        """Start waiting sequences in order, up to the first that cannot start. Then choose the prompt tokens of the
        next pass: return (sequence, number of tokens) pairs with at most `prefill_chunk` tokens in total. A
        batch-invariant engine computes one prompt per pass."""
        while self._waiting:
            first = self._waiting[0]
            if not first.ended:
                if first is self._blocked or not self.memory.start(first, self._running):
                    self._blocked = first
                    break
                self._running.append(first)
                self.throughput.reused_tokens += first.cached
            self._waiting.pop(0)
        work, room = [], self.options.prefill_chunk
        for s in self._running:
            n = min(self.memory.next_stop(s) - s.cached, room)
            if n > 0:
                work.append((s, n))
                room = 0 if self.options.batch_invariant else room - n
        return work

    def _prefill(self, work: Sequence[tuple[RunningSequence, int]]) -> list[tuple[RunningSequence, TokenEvent]]:
        started = time.perf_counter()
        events = self.passes.prefill(work)
        for s, _ in work:
            self.memory.computed(s)
        self._blocked = None  # the waiting sequence may be able to share the new pages
        if self.device.type == "cuda" and not all(s.prefilling for s in self._running):
            # Without this synchronisation, the next decoding pass could wait for this pass, and decode_seconds would
            # include the wait.
            torch.cuda.current_stream(self.device).synchronize()
        self.throughput.prefill_tokens += sum(n for _, n in work)
        self.throughput.prefill_seconds += time.perf_counter() - started
        return events

    def _extend(self, ready: Sequence[RunningSequence]) -> list[tuple[RunningSequence, TokenEvent]]:
        if not ready:
            return []
        started = time.perf_counter()
        events = self.passes.extend(ready, self.throughput)
        self.throughput.decode_tokens += sum(event.token is not None for _, event in events)
        self.throughput.decode_seconds += time.perf_counter() - started
        return events

    def _release_ended(self) -> None:
        """Release the memory of sequences that have ended. No pass may be running."""
        for s in [s for s in self._running if s.ended]:
            self._running.remove(s)
            self.memory.release(s)
            self._blocked = None


class Engine(Scheduler):
    """Generate text for requests that start and end while other requests run.

        engine = Engine(load_model(checkpoint), Tokenizer(checkpoint))
        first = engine.add_request("def merge(left, right):", SamplingParams(max_tokens=64))
        while engine.unfinished:
            for event in engine.step():
                print(event.sequence == first, event.text)

    `Scheduler` documents the arguments.
    """

    def stream(self, request: int) -> "EventStream":
        """Return the stream of a request, with all its events. Create at most one stream per request.

        Unfinished requests are known, and so are the `max_sequences` ended requests that were added last. Earlier ended
        requests may be unknown. Raise ValueError for an unknown request.
        """
        found = self._requests.get(request)
        if found is None:
            raise ValueError(f"request: must be unfinished or have ended lately, got {shown(request)}")
        return EventStream(self, found)


class EventStream(Iterator[TokenEvent]):
    """The events of a request, in the order in which their tokens are computed. Reading an event may run passes, which
    serve all requests of the engine. Any thread may read or close the stream.

    request  the number of the request
    """

    def __init__(self, engine: Scheduler, request: Request, before_pass: Callable[[], None] = lambda: None) -> None:
        """before_pass: a function that this stream calls before each pass that it runs"""
        self._engine, self._request, self._before_pass = engine, request, before_pass
        self.request = request.number

    def __next__(self) -> TokenEvent:
        request = self._request
        while True:
            self._engine._alone(self._run_pass, lambda: request.needs_pass)
            with self._engine._changed:
                if request.events:
                    event = request.events.popleft()
                    break
                if request.ended:
                    raise StopIteration
        if isinstance(event, Exception):
            try:
                raise event
            finally:
                # The traceback of `event` refers to this frame. If the frame kept a reference to `event`, this cycle
                # would keep the engine's memory alive until a garbage collection.
                del event
        return event

    def _run_pass(self) -> list[TokenEvent]:
        self._before_pass()
        try:
            return self._engine._pass()
        except Exception as error:
            if not self._request.ended:
                _LOGGER.error("A pass that computed other requests failed.", exc_info=error)
            return []

    def close(self) -> None:
        """End the request and drop its remaining events. Dropping the last reference to the stream also ends the
        request; the engine then releases the request's memory before the next pass."""
        self._engine.abort(self.request)

    def __del__(self) -> None:
        # This method takes no lock, because the garbage collector may call it at any point.
        self._request.end()


def _digest(values: list) -> str:
    return f"ones of digest {hashlib.sha256(repr(values).encode()).hexdigest()[:12]}"
