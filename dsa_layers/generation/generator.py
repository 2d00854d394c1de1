"""Text generation: prompts of different lengths, packed without padding, over a paged cache."""

import contextlib
import hashlib
import logging
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from dsa_layers.arguments import flag, integer, shown
from dsa_layers.cache.cache import Cache
from dsa_layers.cache.compressed_kv_cache import DRAFTS
from dsa_layers.cache.kv_cache import MOST_SLOTS, OutOfPages, most_tokens
from dsa_layers.cache.sizes import CacheSizes
from dsa_layers.cache.state_copies import StateCopies
from dsa_layers.checkpoint.memory import room_for_caches
from dsa_layers.families.model import Model
from dsa_layers.generation.captured_step import GRAPHS, power_of_two
from dsa_layers.generation.draws import RandomStream
from dsa_layers.generation.invariant_models import check_invariant
from dsa_layers.generation.passes import Passes
from dsa_layers.generation.prompts import encode_prompts
from dsa_layers.generation.results import Completion, Throughput, TokenEvent
from dsa_layers.generation.running_sequence import RunningSequence
from dsa_layers.generation.sampling import SamplingParams
from dsa_layers.generation.sequence_memory import SequenceMemory
from dsa_layers.generation.shared_prefixes import SharedPrefixes
from dsa_layers.generation.stop_strings import StopStrings, check_stop_strings
from dsa_layers.generation.token_stream import TokenStream
from dsa_layers.generation.tokenizer import Tokenizer
from dsa_layers.parallel.process_group import agreed, least
from dsa_layers.parallel.ranks import ALONE, Ranks
from dsa_layers.parallel.together import together

_LOGGER = logging.getLogger(__name__)
GREEDY = SamplingParams()
CPU_CACHE_TOKENS = 65536


class Generator:
    """Continues prompts with a model.

    model          on the device to run on: load_model's, or anything else that is a Model
    tokenizer      for text prompts, streamed text and stop strings; None works on token ids alone
    cache_tokens   size of the paged cache; sequences wait for room, and one that can never fit is an error. None: on a
                   GPU what is left of its memory after loading, minus a tenth of it for activations, and at most the
                   model's context for each of max_sequences; the number is logged, and all ranks take the least. On a
                   CPU 65536; the cache is made anew, larger and without cached prefixes, where a prompt needs more and
                   the memory has room
    page_size      tokens a page; the model's own choice if None
    max_sequences  that run at a time; others wait
    prefill_chunk  prompt tokens computed in one pass, over all sequences, and so between two tokens of a sequence
    cuda_graphs    on a GPU, decoding passes are captured and replayed (`DecodeStep`); False runs them as Python
    max_graphs     CUDA graphs that are kept, and as many of the drafter's: one per power of two of sequences and of
                   pages of the longest one. When another is captured, the least recently used one is dropped
    draft_tokens   so many tokens, up to 3, are drafted behind each sequence by the model's multi-token-prediction layer
                   (load_model's drafter=True), and the next pass computes what the model has after each of them. A
                   draft that the model chooses itself saves a pass; tokens are those without drafts, but for what
                   rounding decides where a pass has more rows, unless batch_invariant. 0: none
    prefix_cache   the full pages of a prompt stay in the cache until their room is needed, and a later prompt, of this
                   call or another, that begins with the same tokens has them instead of computing them again. Tokens
                   are compared themselves. What is on a page is what the prompt would compute if it was cut into
                   chunks there: tokens are those without, but for what rounding decides. The model's weights must stay
                   as they are. Of what a cache keeps by sequence, as DeepSeek-V4's does, there are up to max_sequences
                   copies more (`SharedPrefixes`)
    batch_invariant  the tokens of a sequence depend on no other sequence and not on drafts, bit for bit: decoding
                   passes give a token the same bits whatever else they compute, and a pass over prompts has one
                   prompt. Sampled ones, too, with a seed. Of models with FP8 weights, in bfloat16, on GPUs, and
                   without a prefix_cache; slower

    A step of generation is a pass over a chunk of the prompts that are not in the cache yet, if there are any, first
    come first served, and then a pass that extends each sequence whose prompt is. Prompts start when there is room; a
    step's events come in the order of its passes, each as soon as its pass has ended, and of a pass in the order in
    which sequences started.

    A sequence reserves pages for its prompt and all its new tokens when it starts, so none is ever evicted.

    One call of `generate` or `stream` runs at a time. Another one, of whatever thread, is refused with a RuntimeError
    until the first has ended: it cannot wait, since a stream goes on only when its reader asks for the next event, and
    that reader may be the very thread that would wait. `close_stream` ends a stream that nobody reads any more.
    Threads that share a generator take turns by a lock of their own, or send their prompts in one call.

    Of a model that several ranks have parts of (load_model's mesh), all ranks make the same calls: others are refused,
    and seeds that are not given are the first rank's. An error within a pass leaves the other ranks waiting for this
    one: it has to end them.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer | None = None,
        *,
        cache_tokens: int | None = None,
        page_size: int | None = None,
        max_sequences: int = 64,
        prefill_chunk: int = 2048,
        cuda_graphs: bool = True,
        max_graphs: int = GRAPHS,
        draft_tokens: int = 0,
        prefix_cache: bool = False,
        batch_invariant: bool = False,
    ) -> None:
        if not isinstance(model, Model):
            raise TypeError(f"model: must be a model as load_model returns it, got {type(model).__name__}")
        self.model = model
        self.tokenizer = tokenizer
        self.device = next(model.parameters()).device
        self._ranks: Ranks = getattr(model, "ranks", ALONE)
        with together(self._ranks) as facts:
            if tokenizer is not None and not (hasattr(tokenizer, "encode") and hasattr(tokenizer, "stream")):
                raise TypeError(f"tokenizer: must be a dsa_layers.Tokenizer or None, got {type(tokenizer).__name__}")
            page_size = model.page_size if page_size is None else page_size
            page_size = integer("page_size", page_size, at_least=1, at_most=MOST_SLOTS // 4)
            if cache_tokens is not None:
                cache_tokens = integer("cache_tokens", cache_tokens, at_least=1, at_most=most_tokens(page_size))
            self._max_sequences = integer("max_sequences", max_sequences, at_least=1)
            self.prefill_chunk = integer("prefill_chunk", prefill_chunk, at_least=1)
            self._drafts = integer("draft_tokens", draft_tokens, at_least=0, at_most=DRAFTS)
            if self._drafts and getattr(model, "drafter", None) is None:
                raise ValueError(
                    "draft_tokens: must be 0 for a model without a drafter (load_model's drafter=True), "
                    f"got {self._drafts}"
                )
            capture, prefix_cache = flag("cuda_graphs", cuda_graphs), flag("prefix_cache", prefix_cache)
            self._max_graphs = integer("max_graphs", max_graphs, at_least=1)
            self._invariant = flag("batch_invariant", batch_invariant)
            if self._invariant:
                check_invariant(model)
                if prefix_cache:  # which decides where a prompt is cut, by the others
                    raise ValueError("prefix_cache: must be False with batch_invariant=True, got True")
            self._eos = set(model.config.eos_token_ids)
            if tokenizer is not None and tokenizer.eos_token_id is not None:
                self._eos.add(tokenizer.eos_token_id)
            sizes = {"cache_tokens": cache_tokens, "page_size": page_size, "max_sequences": max_sequences}
            sizes |= {"prefill_chunk": self.prefill_chunk, "draft_tokens": self._drafts, "cuda_graphs": capture}
            sizes |= {"prefix_cache": prefix_cache, "batch_invariant": self._invariant, "max_graphs": max_graphs}
            sizes |= {"tokens that end": sorted(self._eos)}
            facts |= {name: str(size) for name, size in sizes.items()}
            self._prefix_cache, self._page_size = prefix_cache, page_size
            self._copies_states = prefix_cache and self._keeps_states(page_size)
            self._options = {"drafts": self._drafts, "capture": capture, "invariant": self._invariant}
            self._grows = cache_tokens is None and self.device.type == "cpu"
            capacity = self._default_capacity() if cache_tokens is None else -(-cache_tokens // page_size)
        capacity = least(self._ranks, capacity)
        with together(self._ranks):
            self._allocate(capacity)
        if cache_tokens is None and self.device.type == "cuda" and self._ranks.rank == 0:
            _LOGGER.info("The cache holds %d tokens.", capacity * page_size)
        self.throughput = Throughput()
        self._lock = threading.Lock()
        self._stream: weakref.ref[TokenStream] | None = None

    def _default_capacity(self) -> int:
        """Pages of the cache where nobody says how many. Raises ValueError for a GPU that has no room for one."""
        context = self.model.config.max_position_embeddings
        most = min(self._max_sequences * self._pages(context), MOST_SLOTS // self._page_size - 2)
        if self._grows:
            return min(most, -(-CPU_CACHE_TOKENS // self._page_size))
        capacity = min(most, self._room(self._max_sequences))
        if capacity < 1:
            raise ValueError(f"cache_tokens: the memory of {self.device} has no room for the model and a cache")
        return capacity

    def _room(self, sequences: int) -> int:
        """Pages that the device has memory for, besides what is allocated there."""
        room = room_for_caches(self.device)
        if room is None:
            return MOST_SLOTS // self._page_size - 2
        cached = (self.model, self.model.drafter) if self._drafts else (self.model,)
        sizes = CacheSizes.of(cached, self._page_size)
        if self._copies_states:
            sizes = replace(sizes, slot=2 * sizes.slot)
        return sizes.pages(room - self._own_pages * sizes.page - sizes.slot, sequences)

    @property
    def _own_pages(self) -> int:
        """DecodeStep's own."""
        return self._pages(1)

    def _pages(self, tokens: int) -> int:
        """The pages of a sequence with this many tokens and its drafts."""
        return -(-(tokens + self._drafts) // self._page_size)

    def _allocate(self, capacity: int) -> None:
        """Replace the cache by one of `capacity` pages, with the objects that work on it."""
        # Each sequence has at least one page. DecodeStep has a state slot and pages of its own for padding sequences.
        most = min(self._max_sequences, capacity)
        copied = most if self._copies_states else 0
        pages, slots = capacity + self._own_pages, most + copied + 1
        with self._allocating(pages, self._page_size, slots):
            cache: Cache = self.model.make_cache(pages, self._page_size, self.device, state_slots=slots)
            passes = Passes(self.model, cache, graphs=self._max_graphs, **self._options)
        self.cache, self._passes, self._capacity = cache, passes, capacity
        self._memory = SequenceMemory(cache, self._drafts)
        if self._prefix_cache:
            copies = StateCopies(passes.caches, copied) if copied else None
            self._memory = SharedPrefixes(cache, self._drafts, copies)

    def _grow(self, sequences: Sequence[RunningSequence]) -> None:
        """Make the cache anew where it is too small for one of the sequences."""
        pages = max((self._pages(s.limit) for s in sequences), default=0)
        if pages > self._capacity:
            with together(self._ranks):
                self._allocate(pages)
            if self._ranks.rank == 0:
                _LOGGER.info("The cache was made anew and holds %d tokens.", pages * self._page_size)

    def warm_up(self, batch_sizes: Sequence[int] | None = None, *, max_tokens: int | None = None) -> None:
        """Capture the CUDA graphs of decoding passes before prompts come, so that no sequence waits for a capture.

        batch_sizes  numbers of sequences, up to max_sequences; each is rounded up to a power of two. None: all powers
                     of two up to max_sequences
        max_tokens   tokens of the longest sequence; graphs are captured for each power of two of pages up to its. None:
                     the model's context, or what the cache holds if that is less

        Nothing is done where passes are not captured: on a CPU, with cuda_graphs=False, and for models whose passes
        cannot be. Raises TypeError or ValueError that names the argument, also for more graphs than max_graphs, and
        RuntimeError while a stream is open.
        """
        with together(self._ranks) as facts:
            sizes = self._graph_sizes(batch_sizes, max_tokens)
            facts["graphs"] = str(sizes)
        with self._lock:
            self._check_no_stream()
            for count, pages in sizes if self._passes.captures else ():
                self._passes.warm_up(count, pages)

    def _graph_sizes(self, batch_sizes: Sequence[int] | None, max_tokens: int | None) -> list[tuple[int, int]]:
        """(sequences, pages) of the graphs, the largest first: their memory then holds all others."""
        most = self._max_sequences
        if batch_sizes is None:
            batch_sizes = [1 << i for i in range((min(most, self._capacity) - 1).bit_length() + 1)]
        elif not isinstance(batch_sizes, Sequence) or isinstance(batch_sizes, str | bytes):
            raise TypeError(f"batch_sizes: must be a list of integers or None, got {shown(batch_sizes)}")
        else:
            batch_sizes = [integer(f"batch_sizes[{i}]", n, at_least=1, at_most=most) for i, n in enumerate(batch_sizes)]
        context = self.model.config.max_position_embeddings
        if max_tokens is None:
            max_tokens = min(context, self._capacity * self._page_size - self._drafts)
        else:
            max_tokens = integer("max_tokens", max_tokens, at_least=1, at_most=context)
        widths = range((self._pages(max_tokens) - 1).bit_length() + 1)
        sizes = {(power_of_two(count), 1 << width) for count in batch_sizes for width in widths}
        if len(sizes) > self._max_graphs:
            raise ValueError(
                f"batch_sizes: with sequences of up to {max_tokens} tokens (max_tokens) they need {len(sizes)} graphs; "
                f"accepted: at most {self._max_graphs} (max_graphs)"
            )
        return sorted(sizes, reverse=True)

    def _keeps_states(self, page_size: int) -> bool:
        """Whether the model's cache keeps something by sequence."""
        return bool(self.model.make_cache(1, page_size, "meta", state_slots=1).state_tensors())

    @contextlib.contextmanager
    def _allocating(self, pages: int, page_size: int, state_slots: int) -> Iterator[None]:
        """Of the model's cache and of the drafter's, if drafts are asked for."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not _of_memory(error):
                raise
            cached = (self.model, self.model.drafter) if self._drafts else (self.model,)
            size = sum(one.make_cache(pages, page_size, "meta", state_slots=state_slots).nbytes for one in cached)
            tokens = (pages - 1) * page_size
            raise ValueError(
                f"cache_tokens: a cache of {tokens} tokens takes {size / 1e9:.1f} GB, which cannot be allocated on "
                f"{self.device}"
            ) from error

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] = GREEDY,
        *,
        on_event: Callable[[TokenEvent], None] | None = None,
    ) -> list[Completion]:
        """Completions of all prompts, in their order, and of each prompt SamplingParams.n of them. prompts, params: as
        for `stream`."""
        sequences = self._agreed_sequences(prompts, params)
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

        Raises, before it returns, TypeError or ValueError for prompts and params of other kinds, an empty prompt, a
        token outside the vocabulary, a text that is not Unicode, and a prompt that leaves no room for a token in the
        model's context; OutOfPages for a sequence that the whole cache cannot hold. The first event raises RuntimeError
        while another stream of this generator is open; it may be asked for again once that one has ended.
        """
        sequences = self._agreed_sequences(prompts, params)
        return TokenStream(lambda stream: self._begin(stream, sequences, on_prefill))

    def _agreed_sequences(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
    ) -> list[RunningSequence]:
        """The same on all ranks."""
        with together(self._ranks) as facts:
            sequences = self._sequences(prompts, params)
            if self._ranks.size > 1:
                facts["prompts"] = _digest([s.tokens for s in sequences])
                facts["params"] = _digest([s.params for s in sequences])
        if self._ranks.size > 1:
            self._share_seeds(sequences)
        return sequences

    def _share_seeds(self, sequences: list[RunningSequence]) -> None:
        """Sequences without a seed get the first rank's, or each rank would go on with other tokens."""
        seeds = agreed(self._ranks, lambda: [random.SystemRandom().getrandbits(63) for _ in sequences])
        for s, seed in zip(sequences, seeds):
            if s.params.seed is None:
                s.random = RandomStream(seed)

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
            if self._grows:
                self._grow(sequences)
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
        waiting = deque(sequences)
        running: list[RunningSequence] = []
        self.throughput = Throughput()
        total = sum(s.prompt_len for s in sequences)
        try:
            while waiting or running:
                self._admit(waiting, running)
                if not running:
                    raise OutOfPages(
                        f"prompts[{waiting[0].prompt_index}]: needs {self._memory.pages(waiting[0].limit)} pages, and "
                        f"{self._memory.free} of the cache's {self._capacity} are free: others than this "
                        "generator have taken some, for which it cannot wait"
                    )
                if on_prefill is not None and any(s.prefilling for s in running):
                    on_prefill(self.throughput.prefill_tokens + self.throughput.reused_tokens, total)
                for events in self._step(running):
                    if not waiting and not running:
                        self._stream = None  # these are its last events, and it holds nothing any more
                    yield from events
        finally:
            for sequence in sequences:
                self._memory.release(sequence)

    def _sequences(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
    ) -> list[RunningSequence]:
        encoded = encode_prompts(prompts, self.tokenizer, self.model.config.vocab_size)
        if isinstance(params, SamplingParams):
            params = [_with_seed(params, i * params.n) for i in range(len(encoded))]
        if not isinstance(params, Sequence) or any(not isinstance(one, SamplingParams) for one in params):
            raise TypeError(f"params: must be SamplingParams, or a list of them, got {shown(params)}")
        if len(params) != len(encoded):
            raise ValueError(
                f"params: must be one for all prompts or one for each of {len(encoded)}, got {len(params)}"
            )
        context = self.model.config.max_position_embeddings
        sequences: list[RunningSequence] = []
        for i, (ids, one) in enumerate(zip(encoded, params)):
            if len(ids) >= context:
                raise ValueError(f"prompts[{i}]: has {len(ids)} tokens; the model's context holds {context}")
            if (one.logprobs or 0) > self.model.config.vocab_size:
                raise ValueError(
                    f"logprobs: must be at most the vocabulary of {self.model.config.vocab_size}, got {one.logprobs}"
                )
            if one.stop and self.tokenizer is None:
                raise ValueError("params: stop strings need a tokenizer")
            if one.stop:
                check_stop_strings(one.stop, self.tokenizer)
            limit = min(len(ids) + one.max_tokens, context)
            if self._pages(limit) > self._capacity and not (self._grows and self._pages(limit) <= self._room(1)):
                drafts = f" and {self._drafts} draft{'s' * (self._drafts > 1)}" if self._drafts else ""
                raise OutOfPages(
                    f"prompts[{i}]: {len(ids)} prompt tokens and {limit - len(ids)} new ones{drafts} need "
                    f"{self._pages(limit)} pages of {self._page_size} tokens; the cache has {self._capacity} "
                    "(cache_tokens)"
                )
            for k in range(one.n):
                text = StopStrings(self.tokenizer.stream() if self.tokenizer else None, one.stop)
                own = _with_seed(one, k), limit, text, self._eos
                sequences.append(RunningSequence(len(sequences), ids, *own, prompt_index=i))
        return sequences

    def _admit(self, waiting: deque[RunningSequence], running: list[RunningSequence]) -> None:
        """Start waiting sequences, first come first served, while there is room for them."""
        while waiting and self._memory.start(waiting[0], running):
            self.throughput.reused_tokens += waiting[0].cached
            running.append(waiting.popleft())

    def _step(self, running: list[RunningSequence]) -> Iterator[list[TokenEvent]]:
        """Events of a chunk of the prompts that are not in the cache yet, if there are any; then of a token for each
        sequence whose prompt is, if there are any. So no sequence waits for more than a chunk between two tokens."""
        started = time.perf_counter()
        if work := self._prefill_work(running):
            events = self._passes.prefill(work)
            for s, _ in work:
                self._memory.computed(s)
            self._release_ended(running, events)
            ready = not all(s.prefilling for s in running)
            if ready and self.device.type == "cuda":
                # Or the decoding pass would have to, and its time would be theirs together.
                torch.cuda.current_stream(self.device).synchronize()
            self.throughput.prefill_tokens += sum(n for _, n in work)
            self.throughput.prefill_seconds += time.perf_counter() - started
            yield events
        if ready := [s for s in running if not s.prefilling]:
            started = time.perf_counter()
            events = self._passes.extend(ready, self.throughput)
            self._release_ended(running, events)
            self.throughput.decode_tokens += sum(event.token is not None for event in events)
            self.throughput.decode_seconds += time.perf_counter() - started
            yield events

    def _release_ended(self, running: list[RunningSequence], events: list[TokenEvent]) -> None:
        for event in events:
            if event.finish_reason:
                done = next(s for s in running if s.index == event.sequence)
                running.remove(done)
                self._memory.release(done)

    def _prefill_work(self, running: list[RunningSequence]) -> list[tuple[RunningSequence, int]]:
        """The next tokens of prompts, first come first served, up to `prefill_chunk` of them all; where a sequence is
        to depend on no other one, of one prompt."""
        work, room = [], self.prefill_chunk
        for s in running:
            n = min(self._memory.next_stop(s) - s.cached, room)
            if n > 0:
                work.append((s, n))
                room = 0 if self._invariant else room - n
        return work


def _with_seed(params: SamplingParams, plus: int) -> SamplingParams:
    """With random numbers of their own."""
    return params if params.seed is None or not plus else replace(params, seed=(params.seed + plus) % 2**63)


def _of_memory(error: Exception) -> bool:
    """Whether it says that there is not enough memory. A CPU's allocator raises a plain RuntimeError."""
    told = any(words in str(error) for words in ("out of memory", "DefaultCPUAllocator"))
    return told or isinstance(error, MemoryError | torch.OutOfMemoryError)


def _digest(values: list) -> str:
    """To be compared with other ranks' in a message."""
    return f"ones of digest {hashlib.sha256(repr(values).encode()).hexdigest()[:12]}"
