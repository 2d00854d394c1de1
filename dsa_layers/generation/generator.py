"""Text generation: prompts of different lengths, packed without padding, over a paged cache."""

import contextlib
import hashlib
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import GeneratorType

import torch

from dsa_layers.arguments import flag, integer, shown
from dsa_layers.batch import packing
from dsa_layers.batch.prefill import Chunk, prefill_batch
from dsa_layers.cache.cache import Cache
from dsa_layers.cache.compressed_kv_cache import DRAFTS
from dsa_layers.cache.kv_cache import MOST_SLOTS, OutOfPages
from dsa_layers.families.model import Model
from dsa_layers.generation.decode_step import DecodeStep
from dsa_layers.generation.draft_step import DraftStep
from dsa_layers.generation.prompts import encode_prompts
from dsa_layers.generation.results import Completion, FinishReason, Throughput, TokenEvent
from dsa_layers.generation.running_sequence import RunningSequence
from dsa_layers.generation.sampling import SamplingParams, random_stream, sample, sample_drafted
from dsa_layers.generation.stop_strings import StopStrings
from dsa_layers.generation.tokenizer import Tokenizer
from dsa_layers.parallel.process_group import agreed
from dsa_layers.parallel.ranks import ALONE, Ranks
from dsa_layers.parallel.together import together

GREEDY = SamplingParams()


class TokenStream(Iterator[TokenEvent]):
    """The events of a call of `Generator.stream`, in the order in which their tokens are computed.

    It takes the generator's cache when its first event is asked for. The cache is free again after its last event,
    after an error, after `close`, and when nothing refers to the stream any more.
    """

    def __init__(self, generator: "Generator", sequences: list[RunningSequence]) -> None:
        self._generator, self._sequences = generator, sequences
        self._events: GeneratorType | None = None
        self._closed = False

    def __next__(self) -> TokenEvent:
        if self._closed:
            raise StopIteration
        if self._events is None:
            self._generator._begin(self, self._sequences)
        event = next(self._events)
        if self._closed:  # by another thread, in the meantime
            self._events.close()
            raise StopIteration
        return event

    def close(self) -> None:
        """End here: no event follows, and the cache is free; where another thread is at work on the next event, once
        that is done."""
        self._closed = True
        if self._events is None:
            return
        try:
            self._events.close()
        except ValueError:
            if not self._events.gi_running:
                raise

    @property
    def holds_cache(self) -> bool:
        """Whether it has begun and not ended."""
        return self._events is not None and self._events.gi_frame is not None


class Generator:
    """Continues prompts with a model.

    model          on the device to run on: load_model's, or anything else that is a Model
    tokenizer      for text prompts, streamed text and stop strings; None works on token ids alone
    cache_tokens   size of the paged cache; sequences wait for room, and one that can never fit is an error
    page_size      tokens a page; the model's own choice if None
    max_sequences  that run at a time; others wait
    prefill_chunk  prompt tokens computed in one pass, over all sequences
    cuda_graphs    on a GPU, decoding passes are captured and replayed (`DecodeStep`); False runs them as Python
    draft_tokens   so many tokens, up to 3, are drafted behind each sequence by the model's multi-token-prediction layer
                   (load_model's drafter=True), and the next pass computes what the model has after each of them. A
                   draft that the model chooses itself saves a pass; tokens are those without drafts, but for what
                   rounding decides where a pass has more rows. 0: none

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
        cache_tokens: int = 65536,
        page_size: int | None = None,
        max_sequences: int = 64,
        prefill_chunk: int = 2048,
        cuda_graphs: bool = True,
        draft_tokens: int = 0,
    ) -> None:
        if not isinstance(model, Model):
            raise TypeError(f"model: must be a model as load_model returns it, got {type(model).__name__}")
        if tokenizer is not None and not (hasattr(tokenizer, "encode") and hasattr(tokenizer, "stream")):
            raise TypeError(f"tokenizer: must be a dsa_layers.Tokenizer or None, got {type(tokenizer).__name__}")
        page_size = model.page_size if page_size is None else page_size
        page_size = integer("page_size", page_size, at_least=1, at_most=MOST_SLOTS // 4)
        cache_tokens = integer("cache_tokens", cache_tokens, at_least=1, at_most=MOST_SLOTS - 2 * page_size)
        max_sequences = integer("max_sequences", max_sequences, at_least=1)
        self.prefill_chunk = integer("prefill_chunk", prefill_chunk, at_least=1)
        self._drafts = integer("draft_tokens", draft_tokens, at_least=0, at_most=DRAFTS)
        drafter = getattr(model, "drafter", None)
        if self._drafts and drafter is None:
            raise ValueError(
                f"draft_tokens: must be 0 for a model without a drafter (load_model's drafter=True), got {self._drafts}"
            )
        self.model = model
        self.tokenizer = tokenizer
        self.device = next(model.parameters()).device
        pages = -(-cache_tokens // page_size)
        # Each sequence has a page or more. Beside these a state slot and pages for its tokens are DecodeStep's own.
        own_pages = -(-(1 + self._drafts) // page_size)
        capture = flag("cuda_graphs", cuda_graphs)
        self._ranks: Ranks = getattr(model, "ranks", ALONE)
        sizes = {"cache_tokens": cache_tokens, "page_size": page_size, "max_sequences": max_sequences}
        sizes |= {"prefill_chunk": self.prefill_chunk, "draft_tokens": self._drafts, "cuda_graphs": capture}
        with together(self._ranks) as facts:
            facts |= {name: str(size) for name, size in sizes.items()}
            self.cache = self._make_cache(pages + own_pages, page_size, min(max_sequences, pages) + 1)
            self._decode = DecodeStep(model, self.cache, drafts=self._drafts, capture=capture)
            self._draft: DraftStep | None = None
            if self._drafts:
                arguments = drafter, self.cache, self._drafts, self._decode.padding, self.device
                self._draft = DraftStep(*arguments, capture=capture and model.captures_decode)
        self._capacity = pages
        self.throughput = Throughput()
        self._eos = set(model.config.eos_token_ids)
        if tokenizer is not None and tokenizer.eos_token_id is not None:
            self._eos.add(tokenizer.eos_token_id)
        self._lock = threading.Lock()
        self._stream: weakref.ref[TokenStream] | None = None

    def _make_cache(self, pages: int, page_size: int, state_slots: int) -> Cache:
        try:
            return self.model.make_cache(pages, page_size, self.device, state_slots=state_slots)
        except (RuntimeError, MemoryError) as error:
            size = self.model.make_cache(pages, page_size, "meta", state_slots=state_slots).nbytes
            tokens = (pages - 1) * page_size
            raise ValueError(
                f"cache_tokens: a cache of {tokens} tokens takes {size / 1e9:.1f} GB, which cannot be allocated on "
                f"{self.device}"
            ) from error

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] = GREEDY,
        *,
        on_event: Callable[[TokenEvent], None] | None = None,
    ) -> list[Completion]:
        """Completions of all prompts, in their order. prompts, params: as for `stream`."""
        with together(self._ranks):
            encoded = self._encode(prompts)
        completions = [Completion(len(ids)) for ids in encoded]
        with contextlib.closing(self.stream(encoded, params)) as events:
            for event in events:
                completions[event.sequence].add(event)
                if on_event is not None:
                    on_event(event)
        return completions

    def stream(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] = GREEDY,
    ) -> TokenStream:
        """Events as tokens come. prompts: texts, or lists, arrays or tensors of token ids; params: for all, or one a
        prompt.

        A sequence whose logits are not finite ends with finish_reason "error"; the others go on.

        Raises, before it returns, TypeError or ValueError for prompts and params of other kinds, an empty prompt, a
        token outside the vocabulary, a text that is not Unicode, and a prompt that leaves no room for a token in the
        model's context; OutOfPages for a sequence that the whole cache cannot hold. The first event raises RuntimeError
        while another stream of this generator is open; it may be asked for again once that one has ended.
        """
        with together(self._ranks) as facts:
            sequences = self._sequences(prompts, params)
            if self._ranks.size > 1:
                facts["prompts"] = _digest([s.tokens for s in sequences])
                facts["params"] = _digest([s.params for s in sequences])
        if self._ranks.size > 1:
            self._share_seeds(sequences)
        return TokenStream(self, sequences)

    def _share_seeds(self, sequences: list[RunningSequence]) -> None:
        """Sequences without a seed get the first rank's, or each rank would go on with other tokens."""
        seeds = agreed(self._ranks, lambda: [random.SystemRandom().getrandbits(63) for _ in sequences])
        for s, seed in zip(sequences, seeds):
            if s.params.seed is None:
                s.random = random_stream(replace(s.params, seed=seed))

    def close_stream(self) -> None:
        """End the stream that is open, if there is one."""
        stream = self._open_stream()
        if stream is not None:
            stream.close()

    def _open_stream(self) -> TokenStream | None:
        stream = None if self._stream is None else self._stream()
        return stream if stream is not None and stream.holds_cache else None

    def _begin(self, stream: TokenStream, sequences: list[RunningSequence]) -> None:
        """Gives the stream its events; it is from now on the open one."""
        with self._lock:
            if self._open_stream() is not None:
                raise RuntimeError(
                    "stream: another stream of this generator is open and holds the cache; read it to its end or close "
                    "it first (Generator.close_stream())"
                )
            self._stream = weakref.ref(stream)
            stream._events = self._events(sequences)

    @torch.inference_mode()
    def _events(self, sequences: list[RunningSequence]) -> Iterator[TokenEvent]:
        waiting = deque(sequences)
        running: list[RunningSequence] = []
        self.throughput = Throughput()
        try:
            while waiting or running:
                self._admit(waiting, running)
                if not running:
                    raise OutOfPages(
                        f"prompts[{waiting[0].index}]: needs {self._pages(waiting[0].limit)} pages, and "
                        f"{self.cache.allocator.free} of the cache's {self._capacity} are free: others than this "
                        "generator have taken some, for which it cannot wait"
                    )
                yield from self._step(running)
        finally:
            for sequence in sequences:
                self._release(sequence)

    def _encode(self, prompts: Sequence[str | Sequence[int]]) -> list[list[int]]:
        return encode_prompts(prompts, self.tokenizer, self.model.config.vocab_size)

    def _sequences(
        self, prompts: Sequence[str | Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[RunningSequence]:
        encoded = self._encode(prompts)
        if isinstance(params, SamplingParams):
            params = [params] * len(encoded)
        if not isinstance(params, Sequence) or any(not isinstance(one, SamplingParams) for one in params):
            raise TypeError(f"params: must be SamplingParams, or a list of them, got {shown(params)}")
        if len(params) != len(encoded):
            raise ValueError(
                f"params: must be one for all prompts or one for each of {len(encoded)}, got {len(params)}"
            )
        context = self.model.config.max_position_embeddings
        sequences = []
        for i, (ids, one) in enumerate(zip(encoded, params)):
            if len(ids) >= context:
                raise ValueError(f"prompts[{i}]: has {len(ids)} tokens; the model's context holds {context}")
            if one.stop and self.tokenizer is None:
                raise ValueError("params: stop strings need a tokenizer")
            limit = min(len(ids) + one.max_new_tokens, context)
            if self._pages(limit) > self._capacity:
                drafts = f" and {self._drafts} drafts" if self._drafts else ""
                raise OutOfPages(
                    f"prompts[{i}]: {len(ids)} prompt tokens and {limit - len(ids)} new ones{drafts} need "
                    f"{self._pages(limit)} pages of {self.cache.page_size} tokens; the cache has "
                    f"{self._capacity} (cache_tokens)"
                )
            text = StopStrings(self.tokenizer.stream() if self.tokenizer else None, one.stop)
            sequences.append(RunningSequence(i, ids, one, limit, text))
        return sequences

    def _pages(self, tokens: int) -> int:
        """Of a sequence of so many tokens, and drafts behind its last but one."""
        return -(-(tokens + self._drafts) // self.cache.page_size)

    def _admit(self, waiting: deque[RunningSequence], running: list[RunningSequence]) -> None:
        """Start waiting sequences, first come first served, while their pages and a state slot are free."""
        cache = self.cache
        while waiting and cache.state_slots.free and self._pages(waiting[0].limit) <= cache.allocator.free:
            sequence = waiting.popleft()
            sequence.pages = cache.allocator.allocate(self._pages(sequence.limit))
            (sequence.state_slot,) = cache.state_slots.allocate(1)
            running.append(sequence)

    def _release(self, sequence: RunningSequence) -> None:
        """Its pages and its state slot go back, if it has any."""
        pages, state_slot = sequence.pages, sequence.state_slot
        sequence.pages, sequence.state_slot = [], -1
        self.cache.allocator.release(pages)
        if state_slot >= 0:
            self.cache.state_slots.release([state_slot])

    def _step(self, running: list[RunningSequence]) -> list[TokenEvent]:
        """One pass: a chunk of the prompts that are not in the cache yet, else one token for every sequence."""
        started = time.perf_counter()
        prefill = any(s.prefilling for s in running)
        if prefill:
            events, count = self._prefill(running)
        else:
            events = self._extend_all(running)
            count = sum(event.token is not None for event in events)
        for event in events:
            if event.finish_reason:
                done = next(s for s in running if s.index == event.sequence)
                running.remove(done)
                self._release(done)
        seconds = time.perf_counter() - started
        if prefill:
            self.throughput.prefill_tokens += count
            self.throughput.prefill_seconds += seconds
        else:
            self.throughput.decode_tokens += count
            self.throughput.decode_seconds += seconds
        return events

    def _extend_all(self, running: list[RunningSequence]) -> list[TokenEvent]:
        """A token for every sequence, and those of its drafts that the model chooses, too."""
        params, randoms = [s.params for s in running], [s.random for s in running]
        if self._draft is None:
            chosen = [[token] for token in sample(self._decode(running), params, randoms)]
        else:
            logits, states = self._decode(running)
            chosen = sample_drafted(logits, [s.drafts for s in running], params, randoms)
        events = [self._take(s, tokens) for s, tokens in zip(running, chosen)]
        for s in running:
            s.cached = len(s.tokens) - 1
        if self._draft is not None:
            taken = [[event.token for event in own if event.token is not None] for own in events]
            self.throughput.drafted += self._drafts * len(running)
            self.throughput.taken += sum(max(len(own) - 1, 0) for own in taken)
            if any(own[-1].finish_reason is None for own in events):
                for s, drafts in zip(running, self._draft(running, taken, states)):
                    s.drafts = drafts
        return [event for own in events for event in own]

    def _take(self, s: RunningSequence, tokens: list[int | None]) -> list[TokenEvent]:
        """The events of a sequence's next tokens, up to its end; None is one that could not be chosen."""
        events = []
        for token in tokens:
            events.append(self._fail(s) if token is None else self._extend(s, token))
            if events[-1].finish_reason:
                break
        return events

    def _prefill(self, running: list[RunningSequence]) -> tuple[list[TokenEvent], int]:
        """A pass over the next prompt tokens, and how many there are; the first new token of each sequence whose prompt
        ends in it."""
        work = self._prefill_work(running)
        chunks = [Chunk(n, s.cached, s.pages, s.state_slot) for s, n in work]
        batch = prefill_batch(chunks, self.cache.page_size, self.device)
        tokens = packing.to_device(
            [t for s, n in work for t in s.tokens[s.cached : s.cached + n]], torch.int64, self.device
        )
        if self._draft is None:
            logits = self.model(tokens, batch, self.cache)
        else:
            states = self.model.states(tokens, batch, self.cache)
            logits = self.model.logits(states[batch.last_tokens])
        for s, n in work:
            s.cached += n
        # Of a prompt that is not in the cache yet, nothing follows.
        ready = [(row, s) for row, (s, _) in enumerate(work) if not s.prefilling]
        events = []
        if ready:
            rows, sequences = map(list, zip(*ready))
            logits = logits if len(rows) == len(work) else logits[rows]
            chosen = sample(logits, [s.params for s in sequences], [s.random for s in sequences])
            events = [event for s, token in zip(sequences, chosen) for event in self._take(s, [token])]
        if self._draft is not None:
            # The tokens behind the pass's: of a sequence without one, which has ended, any.
            behind = [[*s.tokens[s.cached - n + 1 : s.cached + 1], 0][:n] for s, n in work]
            behind = packing.to_device([token for own in behind for token in own], torch.int64, self.device)
            states = self._draft.prefill(behind, states, batch)
            if ready:
                for s, drafts in zip(sequences, self._draft.behind(sequences, states[batch.last_tokens[rows]])):
                    s.drafts = drafts
        return events, sum(n for _, n in work)

    def _prefill_work(self, running: list[RunningSequence]) -> list[tuple[RunningSequence, int]]:
        work, room = [], self.prefill_chunk
        for s in running:
            n = min(s.prompt_len - s.cached, room)
            if n > 0:
                work.append((s, n))
                room -= n
        return work

    def _extend(self, s: RunningSequence, token: int) -> TokenEvent:
        s.tokens.append(token)
        reason: FinishReason | None = None
        if token in self._eos:
            reason = "eos"
        elif len(s.tokens) >= s.limit:
            reason = "length"
        text, stopped = s.text.push(token, last=reason is not None)
        return TokenEvent(s.index, token, text, "stop" if stopped else reason)

    def _fail(self, s: RunningSequence) -> TokenEvent:
        error = (
            f"prompts[{s.index}]: its logits after {len(s.tokens)} tokens hold NaN or infinity: the weights do, or an "
            "activation overflowed"
        )
        return TokenEvent(s.index, None, s.text.finish(), "error", error)


def _digest(values: list) -> str:
    """To be compared with other ranks' in a message."""
    return f"ones of digest {hashlib.sha256(repr(values).encode()).hexdigest()[:12]}"
