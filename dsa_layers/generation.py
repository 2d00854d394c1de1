"""Text generation: prompts of different lengths, packed without padding, over a paged cache."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from dsa_layers.decode_step import DecodeStep
from dsa_layers.kv_cache import OutOfPages
from dsa_layers.models.deepseek_v4 import DeepseekV4ForCausalLM
from dsa_layers.models.sparse_mla import SparseMLAForCausalLM
from dsa_layers.sampling import SamplingParams, random_stream, sample
from dsa_layers.sequence_batch import SequenceBatch
from dsa_layers.stop_strings import StopStrings
from dsa_layers.tokenizer import Tokenizer

GREEDY = SamplingParams()
FinishReason = Literal["eos", "stop", "length"]


@dataclass(frozen=True)
class TokenEvent:
    """One new token of one sequence. text: what can be shown by now; it may lag behind tokens, and joins up to the
    sequence's text. finish_reason: set with the last token."""

    sequence: int
    token: int
    text: str
    finish_reason: FinishReason | None


@dataclass
class Completion:
    """A finished sequence. tokens: the new ones, with the end-of-sequence token if that ended it."""

    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None


@dataclass
class Throughput:
    """Tokens and seconds of the passes over prompts and of those that extend sequences by one token each."""

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0

    def __str__(self) -> str:
        prefill = self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else 0.0
        decode = self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0
        return (
            f"prefill: {self.prefill_tokens} tokens, {prefill:.1f} tokens/s; "
            f"decode: {self.decode_tokens} tokens, {decode:.1f} tokens/s"
        )


class _Sequence:
    """A sequence on its way: its tokens, its pages, and how many of its tokens are in the cache."""

    def __init__(self, index: int, prompt: Sequence[int], params: SamplingParams, limit: int, text: StopStrings):
        self.index = index
        self.tokens = list(prompt)
        self.prompt_len = len(prompt)
        self.params = params
        self.limit = limit
        self.text = text
        self.random = random_stream(params)
        self.pages: list[int] = []
        self.lane = -1
        self.cached = 0

    @property
    def prefilling(self) -> bool:
        return self.cached < self.prompt_len


class Generator:
    """Continues prompts with a model.

    model          on the device to run on
    tokenizer      for text prompts, streamed text and stop strings; None works on token ids alone
    cache_tokens   size of the paged cache; sequences wait for room, and one that can never fit is an error
    page_size      tokens a page; the model's own choice if None
    max_sequences  that run at a time; others wait
    prefill_chunk  prompt tokens computed in one pass, over all sequences
    cuda_graphs    on a GPU, decoding passes are captured and replayed (`DecodeStep`); False runs them as Python

    A sequence reserves pages for its prompt and all its new tokens when it starts, so none is ever evicted.
    """

    def __init__(
        self,
        model: SparseMLAForCausalLM | DeepseekV4ForCausalLM,
        tokenizer: Tokenizer | None = None,
        *,
        cache_tokens: int = 65536,
        page_size: int | None = None,
        max_sequences: int = 64,
        prefill_chunk: int = 2048,
        cuda_graphs: bool = True,
    ) -> None:
        page_size = model.page_size if page_size is None else page_size
        sizes = {"cache_tokens": cache_tokens, "page_size": page_size, "max_sequences": max_sequences}
        for name, value in {**sizes, "prefill_chunk": prefill_chunk}.items():
            if value < 1:
                raise ValueError(f"{name}: must be at least 1, got {value}")
        self.model = model
        self.tokenizer = tokenizer
        self.prefill_chunk = prefill_chunk
        self.device = next(model.parameters()).device
        pages = -(-cache_tokens // page_size)
        # One page and one lane more than sequences may take: DecodeStep's own.
        self.cache = model.make_cache(pages + 1, page_size, self.device, lanes=max_sequences + 1)
        self._decode = DecodeStep(model, self.cache, capture=cuda_graphs)
        self._capacity = pages
        self.throughput = Throughput()
        self._eos = set(model.config.eos_token_ids)
        if tokenizer is not None and tokenizer.eos_token_id is not None:
            self._eos.add(tokenizer.eos_token_id)

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] = GREEDY,
        *,
        on_event: Callable[[TokenEvent], None] | None = None,
    ) -> list[Completion]:
        """Completions of all prompts, in their order. prompts, params: as for `stream`."""
        encoded = self._encode(prompts)
        completions = [Completion(len(ids)) for ids in encoded]
        for event in self.stream(encoded, params):
            done = completions[event.sequence]
            done.tokens.append(event.token)
            done.text += event.text
            done.finish_reason = event.finish_reason
            if on_event is not None:
                on_event(event)
        return completions

    @torch.inference_mode()
    def stream(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] = GREEDY,
    ) -> Iterator[TokenEvent]:
        """Events as tokens come. prompts: texts, or lists of token ids; params: for all, or one a prompt.

        Raises ValueError for an empty prompt, a token outside the vocabulary, or a prompt that leaves no room for a
        token in the model's context; OutOfPages for a sequence that the whole cache cannot hold. All before any work.
        """
        waiting = deque(self._sequences(prompts, params))
        running: list[_Sequence] = []
        self.throughput = Throughput()
        try:
            while waiting or running:
                self._admit(waiting, running)
                yield from self._step(running)
        finally:
            for sequence in running:
                self._release(sequence)

    def _encode(self, prompts: Sequence[str | Sequence[int]]) -> list[list[int]]:
        if isinstance(prompts, str):
            raise TypeError("prompts: must be a list of prompts, got one string")
        encoded = []
        for i, prompt in enumerate(prompts):
            if isinstance(prompt, str) and self.tokenizer is None:
                raise ValueError(f"prompts[{i}]: must be token ids for a generator without a tokenizer, got a string")
            if len(prompt) == 0:
                raise ValueError(f"prompts[{i}]: is empty; a prompt needs at least one token")
            encoded.append(self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt))
        return encoded

    def _sequences(
        self, prompts: Sequence[str | Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[_Sequence]:
        encoded = self._encode(prompts)
        if isinstance(params, SamplingParams):
            params = [params] * len(encoded)
        if len(params) != len(encoded):
            raise ValueError(
                f"params: must be one for all prompts or one for each of {len(encoded)}, got {len(params)}"
            )
        context, vocab = self.model.config.max_position_embeddings, self.model.config.vocab_size
        sequences = []
        for i, (ids, one) in enumerate(zip(encoded, params)):
            if outside := [t for t in ids if not 0 <= t < vocab]:
                raise ValueError(f"prompts[{i}]: token {outside[0]} is outside the model's vocabulary of {vocab}")
            if len(ids) >= context:
                raise ValueError(f"prompts[{i}]: has {len(ids)} tokens; the model's context holds {context}")
            if one.stop and self.tokenizer is None:
                raise ValueError("params: stop strings need a tokenizer")
            limit = min(len(ids) + one.max_new_tokens, context)
            if self._pages(limit) > self._capacity:
                raise OutOfPages(
                    f"prompts[{i}]: {len(ids)} prompt tokens and {limit - len(ids)} new ones need "
                    f"{self._pages(limit)} pages of {self.cache.page_size} tokens; the cache has "
                    f"{self._capacity} (cache_tokens)"
                )
            text = StopStrings(self.tokenizer.stream() if self.tokenizer else None, one.stop)
            sequences.append(_Sequence(i, ids, one, limit, text))
        return sequences

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.cache.page_size)

    def _admit(self, waiting: deque[_Sequence], running: list[_Sequence]) -> None:
        """Start waiting sequences, first come first served, while their pages and a lane are free."""
        cache = self.cache
        while waiting and cache.lanes.free and self._pages(waiting[0].limit) <= cache.allocator.free:
            sequence = waiting.popleft()
            sequence.pages = cache.allocator.allocate(self._pages(sequence.limit))
            (sequence.lane,) = cache.lanes.allocate(1)
            running.append(sequence)

    def _release(self, sequence: _Sequence) -> None:
        self.cache.allocator.release(sequence.pages)
        self.cache.lanes.release([sequence.lane])

    def _step(self, running: list[_Sequence]) -> list[TokenEvent]:
        """One pass: a chunk of the prompts that are not in the cache yet, else one token for every sequence."""
        started = time.perf_counter()
        prefill = any(s.prefilling for s in running)
        work = self._prefill_work(running) if prefill else [(s, 1) for s in running]
        logits = self._prefill(work) if prefill else self._decode(running)
        for s, n in work:
            s.cached += n
        # Of a prompt that is not in the cache yet, nothing follows.
        ready = [(row, s) for row, (s, _) in enumerate(work) if not s.prefilling]
        events = []
        if ready:
            rows, sequences = zip(*ready)
            logits = logits if len(rows) == len(work) else logits[list(rows)]
            tokens = sample(logits, [s.params for s in sequences], [s.random for s in sequences])
            events = [self._extend(s, token) for s, token in zip(sequences, tokens)]
        for event in events:
            if event.finish_reason:
                done = next(s for s in running if s.index == event.sequence)
                running.remove(done)
                self._release(done)
        seconds = time.perf_counter() - started
        if prefill:
            self.throughput.prefill_tokens += sum(n for _, n in work)
            self.throughput.prefill_seconds += seconds
        else:
            self.throughput.decode_tokens += len(work)
            self.throughput.decode_seconds += seconds
        return events

    def _prefill(self, work: list[tuple[_Sequence, int]]) -> torch.Tensor:
        """logits fp32 [B, vocab_size] after the next n prompt tokens of each sequence."""
        batch = SequenceBatch.paged(
            [n for _, n in work],
            [s.cached + n for s, n in work],
            [s.pages for s, _ in work],
            self.cache.page_size,
            self.device,
            [s.lane for s, _ in work],
        )
        tokens = [t for s, n in work for t in s.tokens[s.cached : s.cached + n]]
        return self.model(torch.tensor(tokens, device=self.device), batch, self.cache)

    def _prefill_work(self, running: list[_Sequence]) -> list[tuple[_Sequence, int]]:
        work, room = [], self.prefill_chunk
        for s in running:
            n = min(s.prompt_len - s.cached, room)
            if n > 0:
                work.append((s, n))
                room -= n
        return work

    def _extend(self, s: _Sequence, token: int) -> TokenEvent:
        s.tokens.append(token)
        reason: FinishReason | None = None
        if token in self._eos:
            reason = "eos"
        elif len(s.tokens) >= s.limit:
            reason = "length"
        text, stopped = s.text.push(token, last=reason is not None)
        return TokenEvent(s.index, token, text, "stop" if stopped else reason)
