"""Generation for requests that join and leave while others run."""

import contextlib
import hashlib
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypedDict, Unpack

import torch

from dsa_layers.arguments import flag, integer, shown
from dsa_layers.cache.cache import Cache
from dsa_layers.cache.compressed_kv_cache import DRAFTS
from dsa_layers.cache.kv_cache import MOST_SLOTS, OutOfPages, most_tokens
from dsa_layers.families.model import Model
from dsa_layers.generation.captured_step import GRAPHS, power_of_two
from dsa_layers.generation.draws import RandomStream
from dsa_layers.generation.engine_cache import EngineCache
from dsa_layers.generation.invariant_models import check_invariant
from dsa_layers.generation.prompts import encode_prompt
from dsa_layers.generation.results import Throughput, TokenEvent
from dsa_layers.generation.running_sequence import RunningSequence
from dsa_layers.generation.sampling import SamplingParams, with_seed
from dsa_layers.generation.stop_strings import StopStrings, check_stop_strings
from dsa_layers.generation.tokenizer import Tokenizer
from dsa_layers.parallel.process_group import agreed
from dsa_layers.parallel.ranks import ALONE, Ranks
from dsa_layers.parallel.together import together

GREEDY = SamplingParams()


class EngineOptions(TypedDict, total=False):
    """Options of `Engine` and `Generator`.

    cache_tokens   size of the paged cache. Sequences wait for room; one that can never fit is refused. None: on a GPU
                   what is left of its memory after loading, minus a tenth of it for activations, and at most the
                   model's context for each of max_sequences; the size is logged, and all ranks take the least. On a
                   CPU 65536; if a prompt needs more and the memory has room, a larger cache, without cached prefixes,
                   replaces it while no sequence runs
    page_size      tokens per page; None: the model's own choice
    max_sequences  sequences that run at a time; others wait (64)
    prefill_chunk  prompt tokens per pass, over all sequences, and so between two tokens of a sequence (2048)
    cuda_graphs    on a GPU, capture and replay decoding passes (`DecodeStep`) (True)
    max_graphs     CUDA graphs that are kept, and as many of the drafter's: one per power of two of sequences and of
                   pages of the longest one. If another one is captured, the least recently used one is dropped (96)
    draft_tokens   tokens, up to 3, that the model's multi-token-prediction layer (load_model's drafter=True) drafts
                   after each sequence. The next pass computes what the model has after each of them. A draft that the
                   model chooses itself saves a pass. Tokens are those without drafts, except that rounding decides
                   where a pass has more rows, unless batch_invariant (0)
    prefix_cache   keep the full pages of a prompt in the cache until their room is needed. A later prompt that begins
                   with the same tokens uses them instead of computing them again. What is on a page is what the prompt
                   would compute if it was cut into chunks there: tokens are those without, except for rounding. The
                   model's weights must not change. Of what a cache keeps by sequence, as DeepSeek-V4's does, there are
                   up to max_sequences copies more (`SharedPrefixes`) (False)
    batch_invariant  the tokens of a sequence depend on no other sequence and not on drafts, bit for bit: decoding
                   passes give a token the same bits whatever else they compute, and a pass over prompts has one
                   prompt. With a seed also sampled ones. For models with FP8 weights, in bfloat16, on GPUs, without a
                   prefix_cache; slower (False)
    """

    cache_tokens: int | None
    page_size: int | None
    max_sequences: int
    prefill_chunk: int
    cuda_graphs: bool
    max_graphs: int
    draft_tokens: int
    prefix_cache: bool
    batch_invariant: bool


DEFAULTS: EngineOptions = {
    "cache_tokens": None,
    "page_size": None,
    "max_sequences": 64,
    "prefill_chunk": 2048,
    "cuda_graphs": True,
    "max_graphs": GRAPHS,
    "draft_tokens": 0,
    "prefix_cache": False,
    "batch_invariant": False,
}


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

    `add_request` and `abort` may be called by any thread, also while a pass runs. Passes run one at a time: a thread
    that asks for a step waits for that of another.

    If several ranks have parts of the model (load_model's mesh), all ranks make the same calls in the same order: other
    requests are refused, and seeds that are not given are the first rank's. An error within a pass leaves the other
    ranks waiting for this one, which must end them.
    """

    def __init__(self, model: Model, tokenizer: Tokenizer | None = None, **options: Unpack[EngineOptions]) -> None:
        if not isinstance(model, Model):
            raise TypeError(f"model: must be a model as load_model returns it, got {type(model).__name__}")
        if unknown := options.keys() - DEFAULTS.keys():
            accepted = ", ".join(DEFAULTS)
            raise TypeError(f"{', '.join(sorted(unknown))}: unknown options; accepted are {accepted}")
        self.model = model
        self.tokenizer = tokenizer
        self.device = next(model.parameters()).device
        self.ranks: Ranks = getattr(model, "ranks", ALONE)
        with together(self.ranks) as facts:
            if tokenizer is not None and not (hasattr(tokenizer, "encode") and hasattr(tokenizer, "stream")):
                raise TypeError(f"tokenizer: must be a dsa_layers.Tokenizer or None, got {type(tokenizer).__name__}")
            given = _checked(model, DEFAULTS | options)
            self._eos = set(model.config.eos_token_ids)
            if tokenizer is not None and tokenizer.eos_token_id is not None:
                self._eos.add(tokenizer.eos_token_id)
            facts |= {name: str(value) for name, value in (given | {"tokens that end": sorted(self._eos)}).items()}
        self.prefill_chunk = given["prefill_chunk"]
        self._max_sequences, self._max_graphs = given["max_sequences"], given["max_graphs"]
        self._drafts, self._invariant = given["draft_tokens"], given["batch_invariant"]
        self._cache = EngineCache(
            model,
            cache_tokens=given["cache_tokens"],
            page_size=given["page_size"],
            max_sequences=self._max_sequences,
            drafts=self._drafts,
            prefix_cache=given["prefix_cache"],
            capture=given["cuda_graphs"],
            invariant=self._invariant,
            graphs=self._max_graphs,
        )
        self.throughput = Throughput()
        self._waiting: deque[RunningSequence] = deque()
        self._running: list[RunningSequence] = []
        self._live: dict[int, RunningSequence] = {}  # unfinished sequences by their numbers
        self._withdrawn: list[RunningSequence] = []  # their memory is still to be released
        self._readers: dict[int, deque[TokenEvent]] = {}  # of streams, by their requests
        self._numbers = 0
        self._extends_next = False
        self._lock = threading.Lock()  # of the fields above
        self._working = threading.Lock()
        self._worker: int | None = None  # the thread that runs a pass

    @property
    def cache(self) -> Cache:
        return self._cache.cache

    @property
    def unfinished(self) -> int:
        """The number of sequences that are waiting or running."""
        return len(self._live)

    def add_request(self, prompt: str | Sequence[int], params: SamplingParams = GREEDY) -> int:
        """Return the number of a new request, which is also that of its sequence in `TokenEvent.sequence`. With
        `params.n` above 1 its further sequences have the numbers that follow; with a seed, its k-th sequence uses
        seed + k.

        Raises TypeError or ValueError for a prompt or params of another kind, an empty prompt, a token outside the
        vocabulary, text that is not Unicode, and a prompt that leaves no room for a token in the model's context.
        Raises OutOfPages for a sequence that the whole cache cannot hold.
        """
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params: must be SamplingParams, got {shown(params)}")
        with together(self.ranks) as facts:
            tokens = encode_prompt("prompt", prompt, self.tokenizer, self.model.config.vocab_size)
            with self._lock:
                request, self._numbers = self._numbers, self._numbers + params.n
            sequences = self.sequences("prompt", tokens, params, request)
            facts |= self.facts_of(sequences)
        self.share_seeds(sequences)
        self.submit(sequences)
        return request

    def step(self) -> list[TokenEvent]:
        """Run a pass and return its events, in the order in which the sequences started; [] if nothing is unfinished.

        A sequence whose logits are not finite ends with finish_reason "error"; the others go on. If a pass raises, no
        request has ended. Raises OutOfPages if nothing runs and others than this engine have taken pages of the cache.
        """
        return self.run_pass()

    def abort(self, request: int) -> None:
        """End a request. It has no further events, and its memory is free once no pass is running. Nothing happens if
        it has ended."""
        with self._lock:
            sequences = [s for s in self._live.values() if s.request == request]
        self.withdraw(sequences)

    def stream(self, request: int) -> Iterator[TokenEvent]:
        """Return the events of a request from now on. They are computed as the iterator is read, by steps that all
        requests share, or by other calls of `step` and other streams. Closing the iterator ends the request.

        Raises ValueError if the request is not known or has ended.
        """
        with self._lock:
            if not any(s.request == request for s in self._live.values()):
                raise ValueError(f"request: must be unfinished, got {shown(request)}")
            events = self._readers[request] = deque()
        return self._read(request, events)

    def _read(self, request: int, events: deque[TokenEvent]) -> Iterator[TokenEvent]:
        try:
            while events or self._is_live(request):
                if events:
                    yield events.popleft()
                    continue
                with self._one_pass():
                    if not events and self._is_live(request):  # another thread may have run the pass
                        self._step(None)
        finally:
            self._readers.pop(request, None)
            self.abort(request)

    def _is_live(self, request: int) -> bool:
        with self._lock:
            return any(s.request == request for s in self._live.values())

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
            sizes = self._graph_sizes(batch_sizes, max_tokens)
            facts["graphs"] = str(sizes)
        with self._one_pass():
            if self.unfinished:
                raise RuntimeError(f"warm_up: must be called while no request runs, got {self.unfinished} unfinished")
            for count, pages in sizes if self._cache.passes.captures else ():
                self._cache.passes.warm_up(count, pages)

    def _graph_sizes(self, batch_sizes: Sequence[int] | None, max_tokens: int | None) -> list[tuple[int, int]]:
        """Return (sequences, pages) of the graphs, the largest first: their memory then holds all others."""
        most, cache = self._max_sequences, self._cache
        if batch_sizes is None:
            batch_sizes = [1 << i for i in range((min(most, cache.capacity) - 1).bit_length() + 1)]
        elif not isinstance(batch_sizes, Sequence) or isinstance(batch_sizes, str | bytes):
            raise TypeError(f"batch_sizes: must be a list of integers or None, got {shown(batch_sizes)}")
        else:
            batch_sizes = [integer(f"batch_sizes[{i}]", n, at_least=1, at_most=most) for i, n in enumerate(batch_sizes)]
        context = self.model.config.max_position_embeddings
        if max_tokens is None:
            max_tokens = min(context, cache.capacity * cache.page_size - self._drafts)
        else:
            max_tokens = integer("max_tokens", max_tokens, at_least=1, at_most=context)
        widths = range((cache.pages(max_tokens) - 1).bit_length() + 1)
        sizes = {(power_of_two(count), 1 << width) for count in batch_sizes for width in widths}
        if len(sizes) > self._max_graphs:
            raise ValueError(
                f"batch_sizes: with sequences of up to {max_tokens} tokens (max_tokens) they need {len(sizes)} graphs; "
                f"accepted: at most {self._max_graphs} (max_graphs)"
            )
        return sorted(sizes, reverse=True)

    # For `Generator`, which numbers the sequences of each call anew.

    def sequences(
        self, name: str, tokens: Sequence[int], params: SamplingParams, first: int, prompt_index: int = 0
    ) -> list[RunningSequence]:
        """Return the `params.n` sequences of a prompt, with numbers from `first` on. name: of the prompt, in errors."""
        context, vocab_size = self.model.config.max_position_embeddings, self.model.config.vocab_size
        if len(tokens) >= context:
            raise ValueError(f"{name}: has {len(tokens)} tokens; the model's context holds {context}")
        if (params.logprobs or 0) > vocab_size:
            raise ValueError(f"logprobs: must be at most the vocabulary of {vocab_size}, got {params.logprobs}")
        if params.stop and self.tokenizer is None:
            raise ValueError("params: stop strings need a tokenizer")
        if params.stop:
            check_stop_strings(params.stop, self.tokenizer)
        limit = min(len(tokens) + params.max_tokens, context)
        if not self._cache.fits(limit):
            drafts = f" and {self._drafts} draft{'s' * (self._drafts > 1)}" if self._drafts else ""
            raise OutOfPages(
                f"{name}: {len(tokens)} prompt tokens and {limit - len(tokens)} new ones{drafts} need "
                f"{self._cache.pages(limit)} pages of {self._cache.page_size} tokens; the cache has "
                f"{self._cache.capacity} (cache_tokens)"
            )
        made = []
        for k in range(params.n):
            text = StopStrings(self.tokenizer.stream() if self.tokenizer else None, params.stop)
            own = with_seed(params, k), limit, text, self._eos
            made.append(RunningSequence(first + k, tokens, *own, name=name, request=first, prompt_index=prompt_index))
        return made

    def submit(self, sequences: Sequence[RunningSequence]) -> None:
        with self._lock:
            self._live |= {s.index: s for s in sequences}
            self._waiting.extend(sequences)

    def withdraw(self, sequences: Sequence[RunningSequence]) -> None:
        """End sequences that have not ended: at once, or after the pass that runs."""
        with self._lock:
            mine = [s for s in sequences if self._live.get(s.index) is s]
            for s in mine:
                del self._live[s.index]
            self._withdrawn += mine
        if self._working.acquire(blocking=False):
            try:
                self._release_withdrawn()
            finally:
                self._working.release()

    def run_pass(self, on_prefill: Callable[[], None] | None = None) -> list[TokenEvent]:
        """`step`. on_prefill is called before a pass over prompts."""
        with self._one_pass():
            return self._step(on_prefill)

    def share_seeds(self, sequences: Sequence[RunningSequence]) -> None:
        """Give sequences without a seed the first rank's, so that all ranks choose the same tokens."""
        if self.ranks.size == 1:
            return
        seeds = agreed(self.ranks, lambda: [random.SystemRandom().getrandbits(63) for _ in sequences])
        for s, seed in zip(sequences, seeds):
            if s.params.seed is None:
                s.random = RandomStream(seed)

    def facts_of(self, sequences: Sequence[RunningSequence]) -> dict[str, str]:
        """Return what ranks compare (`together`)."""
        if self.ranks.size == 1:
            return {}
        return {"prompts": _digest([s.tokens for s in sequences]), "params": _digest([s.params for s in sequences])}

    # A pass.

    @contextlib.contextmanager
    def _one_pass(self) -> Iterator[None]:
        if self._worker == threading.get_ident():  # it would wait for itself
            raise RuntimeError("step: was called by the pass of another step, as a hook may do")
        with self._working:
            self._worker = threading.get_ident()
            try:
                yield
            finally:
                self._worker = None

    @torch.inference_mode()
    def _step(self, on_prefill: Callable[[], None] | None) -> list[TokenEvent]:
        self._release_withdrawn()
        if not self._extends_next:
            self._admit()
        ready = [s for s in self._running if not s.prefilling]
        work = [] if self._extends_next and ready else self._prefill_work()
        self._extends_next = bool(work)
        if work:
            if on_prefill is not None:
                on_prefill()
            return self._finished(self._prefill(work))
        return self._finished(self._extend(ready)) if ready else []

    def _admit(self) -> None:
        """Start waiting sequences, first come first served, while there is room for them."""
        with self._lock:
            waiting = [s for s in self._waiting if self._live.get(s.index) is s]
            self._waiting.clear()
        if waiting and not self._running:
            self._cache.grow(max(s.limit for s in waiting))
        memory, started = self._cache.memory, 0
        while started < len(waiting) and memory.start(waiting[started], self._running):
            self.throughput.reused_tokens += waiting[started].cached
            self._running.append(waiting[started])
            started += 1
        with self._lock:
            self._waiting.extendleft(reversed(waiting[started:]))
        if waiting and not self._running:
            first = waiting[0]
            raise OutOfPages(
                f"{first.name}: needs {memory.pages(first.limit)} pages, and {memory.free} of the cache's "
                f"{self._cache.capacity} are free: others than this engine have taken some, for which it cannot wait"
            )

    def _prefill_work(self) -> list[tuple[RunningSequence, int]]:
        """Return the next tokens of prompts, first come first served, up to `prefill_chunk` of them all. If a sequence
        is to depend on no other one, they are those of one prompt."""
        work, room = [], self.prefill_chunk
        for s in self._running:
            n = min(self._cache.memory.next_stop(s) - s.cached, room)
            if n > 0:
                work.append((s, n))
                room = 0 if self._invariant else room - n
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

    def _finished(self, events: Sequence[TokenEvent]) -> list[TokenEvent]:
        """Release the sequences that have ended. Return the events of those that were not withdrawn."""
        with self._lock:
            kept = [event for event in events if event.sequence in self._live]
            for event in kept:
                s = self._live[event.sequence]
                if (reader := self._readers.get(s.request)) is not None:
                    reader.append(event)
                if event.finish_reason:
                    del self._live[s.index]
                    self._withdrawn.append(s)
        self._release_withdrawn()
        return kept

    def _release_withdrawn(self) -> None:
        """Called by the thread that runs passes."""
        with self._lock:
            ended, self._withdrawn = self._withdrawn, []
        for s in ended:
            if s in self._running:
                self._running.remove(s)
            self._cache.memory.release(s)


def _checked(model: Model, options: EngineOptions) -> EngineOptions:
    """Return the options with the model's page size. Raise TypeError or ValueError that names the option."""
    page_size = options["page_size"]
    page_size = model.page_size if page_size is None else page_size
    page_size = integer("page_size", page_size, at_least=1, at_most=MOST_SLOTS // 4)
    cache_tokens = options["cache_tokens"]
    if cache_tokens is not None:
        cache_tokens = integer("cache_tokens", cache_tokens, at_least=1, at_most=most_tokens(page_size))
    checked: EngineOptions = {
        "cache_tokens": cache_tokens,
        "page_size": page_size,
        "max_sequences": integer("max_sequences", options["max_sequences"], at_least=1),
        "prefill_chunk": integer("prefill_chunk", options["prefill_chunk"], at_least=1),
        "draft_tokens": integer("draft_tokens", options["draft_tokens"], at_least=0, at_most=DRAFTS),
    }
    if checked["draft_tokens"] and getattr(model, "drafter", None) is None:
        raise ValueError(
            "draft_tokens: must be 0 for a model without a drafter (load_model's drafter=True), "
            f"got {checked['draft_tokens']}"
        )
    for name in ("cuda_graphs", "prefix_cache"):
        checked[name] = flag(name, options[name])
    checked["max_graphs"] = integer("max_graphs", options["max_graphs"], at_least=1)
    checked["batch_invariant"] = flag("batch_invariant", options["batch_invariant"])
    if checked["batch_invariant"]:
        check_invariant(model)
        if checked["prefix_cache"]:  # which decides where a prompt is cut, by the others
            raise ValueError("prefix_cache: must be False with batch_invariant=True, got True")
    return checked


def _digest(values: list) -> str:
    return f"ones of digest {hashlib.sha256(repr(values).encode()).hexdigest()[:12]}"
