"""Generation for requests that join and leave while others run."""

import contextlib
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Unpack

import torch

from dsa_layers.arguments import shown
from dsa_layers.cache.cache import Cache
from dsa_layers.cache.kv_cache import OutOfPages
from dsa_layers.families.model import Model
from dsa_layers.generation.engine_cache import EngineCache
from dsa_layers.generation.engine_options import EngineOptions, checked_options
from dsa_layers.generation.graph_sizes import graph_sizes
from dsa_layers.generation.prompts import encode_prompt
from dsa_layers.generation.request_stream import RequestStream
from dsa_layers.generation.requests import Requests
from dsa_layers.generation.results import Throughput, TokenEvent
from dsa_layers.generation.running_sequence import RunningSequence
from dsa_layers.generation.sampling import SamplingParams
from dsa_layers.io.tokenizer import Tokenizer
from dsa_layers.parallel.ranks import ALONE, Ranks
from dsa_layers.parallel.together import together

_LOGGER = logging.getLogger(__name__)
GREEDY = SamplingParams()


class Engine:
    """Generates text for requests that come and go.

        engine = Engine(load_model(checkpoint), Tokenizer(checkpoint))
        first = engine.add_request("def merge(left, right):", SamplingParams(max_tokens=64))
        while engine.unfinished:
            for event in engine.step():
                print(event.sequence == first, event.text)

    model      on the device to run on: load_model's, or anything else that is a Model
    tokenizer  for text prompts, text in events and stop strings; None: token ids alone
    options    `EngineOptions`

    A sequence starts if there is room for its prompt and all its new tokens, first come first served; so none is ever
    evicted. Passes over chunks of prompts that are not in the cache yet alternate with passes that extend each sequence
    whose prompt is.

    `add_request`, `add_stream` and `abort` may be called by any thread, also while a pass runs. Passes run one at a
    time. An exception of a pass ends the requests that the pass computed: `step` raises it, and so do their streams.

    If several ranks have parts of the model (load_model's mesh), one thread of each rank makes the same calls in the
    same order, and closes streams instead of dropping them: other requests are refused, and seeds that are not given
    are the first rank's. An error within a pass leaves the other ranks waiting for this one, which must end them.
    """

    def __init__(self, model: Model, tokenizer: Tokenizer | None = None, **options: Unpack[EngineOptions]) -> None:
        if not isinstance(model, Model):
            raise TypeError(f"model: must be a model as load_model returns it, got {type(model).__name__}")
        self.model = model
        self.tokenizer = tokenizer
        self.device = next(model.parameters()).device
        self.ranks: Ranks = getattr(model, "ranks", ALONE)
        with together(self.ranks) as facts:
            if tokenizer is not None and not (hasattr(tokenizer, "encode") and hasattr(tokenizer, "stream")):
                raise TypeError(f"tokenizer: must be a dsa_layers.Tokenizer or None, got {type(tokenizer).__name__}")
            given = checked_options(model, options)
            eos = set(model.config.eos_token_ids)
            if tokenizer is not None and tokenizer.eos_token_id is not None:
                eos.add(tokenizer.eos_token_id)
            facts |= {name: str(value) for name, value in (given | {"tokens that end": sorted(eos)}).items()}
        self.prefill_chunk = given["prefill_chunk"]
        self._options = given
        self._cache = EngineCache(
            model,
            cache_tokens=given["cache_tokens"],
            page_size=given["page_size"],
            max_sequences=given["max_sequences"],
            drafts=given["draft_tokens"],
            prefix_cache=given["prefix_cache"],
            capture=given["cuda_graphs"],
            invariant=given["batch_invariant"],
            graphs=given["max_graphs"],
        )
        self.requests = Requests(model, tokenizer, self._cache, eos)
        self.throughput = Throughput()
        self._waiting: deque[RunningSequence] = deque()
        self._running: list[RunningSequence] = []
        self._live: dict[int, RunningSequence] = {}  # unfinished sequences by their numbers
        self._withdrawn: list[RunningSequence] = []  # their memory is still to be released
        self._streams: weakref.WeakValueDictionary[int, RequestStream] = weakref.WeakValueDictionary()  # by request
        self._numbers = 0
        self._extends_next = False
        # Of the fields above. Re-entrant: the garbage collector may close a stream while a thread holds it.
        self._changed = threading.Condition(threading.RLock())
        self._worker: int | None = None  # the thread that runs a pass

    @property
    def cache(self) -> Cache:
        return self._cache.cache

    @property
    def unfinished(self) -> int:
        """The number of sequences that are waiting or running."""
        return len(self._live)

    def add_request(self, prompt: str | Sequence[int], params: SamplingParams = GREEDY) -> int:
        """Return the number of a new request, which is also `TokenEvent.sequence` of the first sequence. With
        `params.n` above 1 the further sequences have the numbers that follow; with a seed, the k-th one uses seed + k.

        Raises TypeError or ValueError for a prompt or params of another kind, an empty prompt, a token outside the
        vocabulary, text that is not Unicode, and a prompt that leaves no room for a token in the model's context.
        Raises OutOfPages for a sequence that the whole cache cannot hold.
        """
        sequences = self._request(prompt, params)
        self.submit(sequences)
        return sequences[0].request

    def add_stream(self, prompt: str | Sequence[int], params: SamplingParams = GREEDY) -> RequestStream:
        """Return the stream of a new request, with all its events. Raises as `add_request` does."""
        sequences = self._request(prompt, params)
        stream = RequestStream(sequences[0].request, self._next_event, self.abort)
        self.submit(sequences, stream)
        return stream

    def _request(self, prompt: str | Sequence[int], params: SamplingParams) -> list[RunningSequence]:
        with self.requests.agreed() as sequences:
            if not isinstance(params, SamplingParams):
                raise TypeError(f"params: must be SamplingParams, got {shown(params)}")
            tokens = encode_prompt("prompt", prompt, self.tokenizer, self.model.config.vocab_size)
            sequences += self.requests.sequences("prompt", tokens, params, 0)
        with self._changed:  # only now, so that ranks give no number to a request that one of them refuses
            first, self._numbers = self._numbers, self._numbers + params.n
        for s in sequences:
            s.index, s.request, s.name = first + s.index, first, f"request {first}"
        return sequences

    def step(self) -> list[TokenEvent]:
        """Run a pass and return its events, in the order in which the sequences started; [] if nothing is unfinished.

        A sequence whose logits are not finite ends with finish_reason "error"; the others go on. Raises OutOfPages if
        nothing runs and others than this engine have taken pages of the cache; the first waiting request then ends.
        """
        return self.run_pass()

    def abort(self, request: int) -> None:
        """End a request. It has no further events, not even one with a finish_reason, and its memory is free once no
        pass is running. Nothing happens if it has ended."""
        with self._changed:
            sequences = self._unfinished_of(request)
            if (stream := self._streams.get(request)) is not None:
                stream.events.clear()
        self.withdraw(sequences)

    def stream(self, request: int) -> RequestStream:
        """Return the events of a request from now on; `add_stream` misses none if other threads run passes.

        Raises ValueError if the request is not known, has ended, or has a stream.
        """
        with self._changed:
            if not self._unfinished_of(request):
                raise ValueError(f"request: must be unfinished, got {shown(request)}")
            if self._streams.get(request) is not None:
                raise ValueError(f"request: must be one without a stream, got {shown(request)}")
            stream = self._streams[request] = RequestStream(request, self._next_event, self.abort)
        return stream

    def _unfinished_of(self, request: int) -> list[RunningSequence]:
        return [s for s in list(self._live.values()) if s.request == request]

    def _next_event(self, stream: RequestStream) -> TokenEvent | None:
        """Return the next event of a stream, None after its last one. Run passes, or wait for those of other threads,
        until there is one."""
        while True:
            with self._changed:
                if stream.events:
                    return stream.events.popleft()
                if stream.error is not None:
                    error, stream.error = stream.error, None
                    raise error
                if self._is_served(stream):
                    return None
                self._check_no_own_pass()
            try:
                self.run_pass(wanted=stream)
            except Exception as error:
                if stream.error is not error:
                    _LOGGER.error("A pass that computed other requests failed.", exc_info=error)

    def _is_served(self, stream: RequestStream | None) -> bool:
        """Return whether a stream needs no pass: it has an event, or its request has ended."""
        return stream is not None and bool(stream.events or not self._unfinished_of(stream.request))

    def warm_up(self, batch_sizes: Sequence[int] | None = None, *, max_tokens: int | None = None) -> None:
        """Capture the CUDA graphs of decoding passes before prompts come, so that no sequence waits for a capture.

        batch_sizes  numbers of sequences, up to max_sequences; each is rounded up to a power of two. None: all powers
                     of two up to max_sequences
        max_tokens   tokens of the longest sequence; graphs are captured for each power of two of pages up to its. None:
                     the model's context, or what the cache holds if that is less

        Does nothing if passes are not captured: on a CPU, with cuda_graphs=False, and for models whose passes cannot
        be. Raises TypeError or ValueError that names the argument, also for more graphs than max_graphs, and
        RuntimeError if a request is unfinished.
        """
        with together(self.ranks) as facts:
            sizes = graph_sizes(self._cache, self._options, batch_sizes, max_tokens)
            facts["graphs"] = str(sizes)
        with self._one_pass():
            if self.unfinished:
                raise RuntimeError(f"warm_up: must be called while no request runs, got {self.unfinished} unfinished")
            for count, pages in sizes if self._cache.passes.captures else ():
                self._cache.passes.warm_up(count, pages)

    # For `Generator`, which numbers the sequences of each call anew.

    def submit(self, sequences: Sequence[RunningSequence], stream: RequestStream | None = None) -> None:
        with self._changed:
            if stream is not None:
                self._streams[stream.request] = stream
            self._live |= {s.index: s for s in sequences}
            self._waiting.extend(sequences)

    def withdraw(self, sequences: Sequence[RunningSequence], error: Exception | None = None) -> None:
        """End sequences that have not ended: at once, or after the pass that runs. error: raised by their streams."""
        with self._changed:
            mine = [s for s in sequences if self._live.get(s.index) is s]
            for s in mine:
                del self._live[s.index]
                if error is not None and (stream := self._streams.get(s.request)) is not None:
                    stream.error = error
            if mine:
                self._waiting = deque(s for s in self._waiting if self._live.get(s.index) is s)
            self._withdrawn += mine
            if self._worker is None:
                self._release_withdrawn()
            self._changed.notify_all()

    def run_pass(
        self, on_prefill: Callable[[], None] | None = None, wanted: RequestStream | None = None
    ) -> list[TokenEvent]:
        """`step`. on_prefill is called before a pass over prompts. With `wanted`, run none if that stream needs none by
        the time that the pass could run."""
        with self._one_pass(wanted) as mine:
            return self._step(on_prefill) if mine else []

    # A pass.

    def _check_no_own_pass(self) -> None:
        if self._worker == threading.get_ident():  # it would wait for itself
            raise RuntimeError("step: was called by the pass of another step, as a hook may do")

    @contextlib.contextmanager
    def _one_pass(self, wanted: RequestStream | None = None) -> Iterator[bool]:
        """Wait for the turn of this thread, and give True; False as soon as `wanted` needs no pass."""
        with self._changed:
            self._check_no_own_pass()
            while self._worker is not None and not self._is_served(wanted):
                self._changed.wait()
            mine = not self._is_served(wanted)
            if mine:
                self._worker = threading.get_ident()
        try:
            yield mine
        finally:
            if mine:
                with self._changed:
                    self._release_withdrawn()
                    self._worker = None
                    self._changed.notify_all()

    @torch.inference_mode()
    def _step(self, on_prefill: Callable[[], None] | None) -> list[TokenEvent]:
        self._release_withdrawn()
        ready = [s for s in self._running if not s.prefilling]
        extends = self._extends_next and bool(ready)
        if not extends:
            self._admit()
        work = [] if extends else self._prefill_work()
        self._extends_next = bool(work)
        if work and on_prefill is not None:
            on_prefill()
        try:
            events = self._prefill(work) if work else self._extend(ready) if ready else []
        except BaseException as error:  # it may have taken tokens, whose events are lost
            requests = {s.request for s in ([s for s, _ in work] or ready)}
            ended = [s for s in list(self._live.values()) if s.request in requests]
            self.withdraw(ended, error if isinstance(error, Exception) else None)
            raise
        return self._delivered(events)

    def _admit(self) -> None:
        """Start waiting sequences, first come first served, while there is room for them."""
        memory = self._cache.memory
        if not self._running:
            memory.look_again()
        while (first := self._first_waiting()) is not None:
            try:
                if not self._running:
                    self._cache.grow(first.limit)
                    memory = self._cache.memory
                started = memory.start(first, self._running)
                if not started and not self._running:
                    raise OutOfPages(
                        f"{first.name}: needs {memory.pages(first.limit)} pages, and {memory.free} of the cache's "
                        f"{self._cache.capacity} are free: others than this engine have taken some, for which it "
                        "cannot wait"
                    )
            except Exception as error:
                self.withdraw([first], error)
                raise
            if not started:
                return
            with self._changed:
                if self._waiting and self._waiting[0] is first:
                    self._waiting.popleft()
            self.throughput.reused_tokens += first.cached
            self._running.append(first)  # if it was withdrawn meanwhile, it is among `_withdrawn`

    def _first_waiting(self) -> RunningSequence | None:
        with self._changed:
            return self._waiting[0] if self._waiting else None

    def _prefill_work(self) -> list[tuple[RunningSequence, int]]:
        """Return the next tokens of prompts, first come first served, up to `prefill_chunk` of them all. If a sequence
        is to depend on no other one, they are those of one prompt."""
        work, room = [], self.prefill_chunk
        for s in self._running:
            n = min(self._cache.memory.next_stop(s) - s.cached, room)
            if n > 0:
                work.append((s, n))
                room = 0 if self._options["batch_invariant"] else room - n
        return work

    def _prefill(self, work: Sequence[tuple[RunningSequence, int]]) -> list[TokenEvent]:
        started = time.perf_counter()
        events = self._cache.passes.prefill(work)
        for s, _ in work:
            self._cache.memory.computed(s)
        if self.device.type == "cuda" and not all(s.prefilling for s in self._running):
            # Or the decoding pass would wait, and its time would be that of both.
            torch.cuda.current_stream(self.device).synchronize()
        self.throughput.prefill_tokens += sum(n for _, n in work)
        self.throughput.prefill_seconds += time.perf_counter() - started
        return events

    def _extend(self, ready: Sequence[RunningSequence]) -> list[TokenEvent]:
        started = time.perf_counter()
        events = self._cache.passes.extend(ready, self.throughput)
        self.throughput.decode_tokens += sum(event.token is not None for event in events)
        self.throughput.decode_seconds += time.perf_counter() - started
        return events

    def _delivered(self, events: Sequence[TokenEvent]) -> list[TokenEvent]:
        """Return the events of sequences that were not withdrawn, and hand them to streams. Release what has ended."""
        kept = []
        with self._changed:
            for event in events:
                s = self._live.get(event.sequence)
                if s is None:
                    continue
                kept.append(event)
                if (stream := self._streams.get(s.request)) is not None:
                    stream.events.append(event)
                if event.finish_reason:
                    self._live.pop(s.index, None)
                    self._withdrawn.append(s)
            self._release_withdrawn()
        return kept

    def _release_withdrawn(self) -> None:
        """While no other thread runs a pass."""
        with self._changed:
            ended, self._withdrawn = self._withdrawn, []
            for s in ended:
                if s in self._running:
                    self._running.remove(s)
                self._cache.memory.release(s)
