"""The passes of an engine, over chunks of prompts and over running sequences. On a GPU the latter are captured as CUDA
graphs, one per size."""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, Generic, TypeVar

import torch

from dsa_layers.batch import packing
from dsa_layers.batch.decode_batch import DecodeInputs, Running
from dsa_layers.batch.sequence_batch import Chunk, prefill_batch
from dsa_layers.cache.cache import Cache
from dsa_layers.engine.batch_invariance import batch_invariant
from dsa_layers.generation.engine_options import EngineOptions
from dsa_layers.generation.requests import RunningSequence, Throughput, TokenEvent
from dsa_layers.generation.sampler import logprobs_of, penalised, sample
from dsa_layers.models.protocols import Drafter, Model
from dsa_layers.parallel.one_shot_sum import check_ranks

Inputs = TypeVar("Inputs", bound=DecodeInputs)


class CapturedStep(Generic[Inputs]):
    """A pass over running sequences. Its size, the numbers of sequences and of pages of the longest one, is rounded up
    to powers of two. On a GPU the first pass of a size is captured as a CUDA graph, which later passes replay: one
    launch instead of thousands. The first pass runs twice, which changes nothing, because it writes the same numbers to
    the same places. The next step overwrites the results.

    A subclass has `_inputs(count, pages)`, which makes the input tensors of a size, and `_run(inputs)`, the pass.
    """

    def __init__(self, device: torch.device, captures: bool) -> None:
        self._device, self.captures = device, captures and device.type == "cuda"
        self._graphs: dict[tuple[int, int], tuple[Inputs, torch.cuda.CUDAGraph, Any]] = {}

    def _step(self, count: int, pages: int, fill: Callable[[Inputs], None]) -> Any:
        """Return the results of a pass of at least this size. fill: writes to the input tensors."""
        if not self.captures:
            inputs = self._inputs(count, pages)
            fill(inputs)
            return self._run(inputs)
        size = power_of_two(count), power_of_two(pages)
        if size not in self._graphs:
            inputs = self._inputs(*size)
            fill(inputs)
            self._graphs[size] = (inputs, *self._capture(inputs))
        inputs, graph, results = self._graphs[size]
        check_ranks()  # a replay calls no sum that could raise
        fill(inputs)
        graph.replay()
        return results

    def _capture(self, inputs: Inputs) -> tuple[torch.cuda.CUDAGraph, Any]:
        """Return the pass as a graph, and its results. The pass runs once before: then kernels compile and libraries
        initialise."""
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            self._run(inputs)
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # One pool for all graphs: only one runs at a time, and its results are read before the next one runs.
        pool = next((g.pool() for _, g, _ in self._graphs.values()), None)
        with torch.cuda.graph(graph, pool=pool):
            results = self._run(inputs)
        return graph, results


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def powers_of_two(most: int) -> list[int]:
    """Return the powers of two up to `power_of_two(most)`, the largest first."""
    return [1 << i for i in reversed(range((most - 1).bit_length() + 1))]


class Padding:
    """A sequence of one token, and drafts, that pads a batch. It has pages and a state slot of its own."""

    def __init__(self, cache: Cache, drafts: int) -> None:
        self.tokens, self.drafts = [0], [0] * drafts
        self.pages = cache.allocator.allocate(-(-(1 + drafts) // cache.page_size))
        (self.state_slot,) = cache.state_slots.allocate(1)

    def longer(self, tokens: int) -> "Padding":
        """Return a sequence of this many tokens, including drafts, which are all in the first page of this one."""
        longer = copy(self)
        longer.tokens = [0] * (tokens - len(self.drafts))
        longer.pages = self.pages[:1] * tokens
        return longer


class DecodeStep(CapturedStep[DecodeInputs]):
    """The model's pass over the last token and the drafts of each of B sequences.

    step(sequences) returns (logits fp32 [B, 1 + drafts, vocab_size] of the token after each of these tokens, the
    model's states [B * (1 + drafts), ...] there, or None without drafts).

    The constructor takes pages and a state slot from the cache for the sequence that pads batches (`padding`). The pass
    is not captured on a CPU, without `capture`, and for a model whose decoding passes cannot be captured. invariant:
    the results of a sequence depend neither on other sequences nor on the number of drafts, bit for bit.
    """

    def __init__(
        self,
        model: Model,
        cache: Cache,
        *,
        drafts: int = 0,
        capture: bool = True,
        invariant: bool = False,
    ) -> None:
        super().__init__(next(model.parameters()).device, capture and model.captures_decode)
        self._model, self._cache, self._drafts, self._invariant = model, cache, drafts, invariant
        self.padding = Padding(cache, drafts)

    @torch.inference_mode()
    def __call__(self, sequences: Sequence[Running]) -> tuple[torch.Tensor, torch.Tensor | None]:
        count, next_n = len(sequences), 1 + self._drafts
        pages = -(-(max(len(s.tokens) for s in sequences) + self._drafts) // self._cache.page_size)
        results = self._step(count, pages, lambda inputs: inputs.fill(sequences, self.padding))
        if not self._drafts:
            return results[:count, None], None
        logits, states = results
        return logits[: count * next_n].unflatten(0, (count, next_n)), states[: count * next_n]

    def _inputs(self, count: int, pages: int) -> DecodeInputs:
        return DecodeInputs(count, pages, self._cache.page_size, self._device, 1 + self._drafts)

    def _run(self, inputs: DecodeInputs) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        with batch_invariant("decoding" if self._invariant else None):
            if not self._drafts:
                return self._model(inputs.tokens, inputs.batch(), self._cache)
            states = self._model.states(inputs.tokens, inputs.batch(), self._cache)
            return self._model.logits(states), states


class DraftInputs(DecodeInputs):
    """The input tensors of a drafting pass.

    tokens [count * (1 + drafts)]   the token after each position of the previous pass
    states [count * (1 + drafts), ...]   the model's states at these positions
    taken [count]      how many of these tokens each sequence has got
    key_lens [count]   its number of tokens with them
    """

    def __init__(
        self, count: int, pages: int, page_size: int, device: torch.device, drafts: int, row: torch.Tensor
    ) -> None:
        super().__init__(count, pages, page_size, device, 1 + drafts)
        self.states = row.new_zeros(count * (1 + drafts), *row.shape)
        self.taken = torch.ones(count, dtype=torch.int32, device=device)

    def fill_after(
        self, sequences: Sequence[Running], taken: Sequence[Sequence[int]], states: torch.Tensor, padding: Padding
    ) -> None:
        self.hold(sequences, padding)
        spare = self.count - len(sequences)
        after = [[*own, *[0] * (self.next_n - len(own))] for own in taken] + [[0] * self.next_n] * spare
        packing.write(self.tokens, [token for own in after for token in own])
        # A sequence that ended without a token gets drafts that nobody uses.
        packing.write(self.taken, [max(len(own), 1) for own in taken] + [1] * spare)
        packing.write(self.key_lens, [len(s.tokens) for s in sequences] + [2] * spare)
        self.states[: len(states)] = states


class DraftStep(CapturedStep[DraftInputs]):
    """The drafter's passes. They compute the `drafts` likeliest tokens after each sequence, one after another.

    cache: the model's cache. The attribute `cache` is the drafter's own cache, with the same pages and state slots.
    Call the object after a verifying pass (`DecodeStep`), and `after_prompts` after the drafter's pass over prompts.
    """

    def __init__(
        self,
        drafter: Drafter,
        cache: Cache,
        drafts: int,
        padding: Padding,
        device: torch.device,
        *,
        capture: bool = True,
    ) -> None:
        super().__init__(device, capture)
        self._drafter, self._drafts, self._padding, self._page_size = drafter, drafts, padding, cache.page_size
        pages, state_slots = cache.allocator.num_pages, cache.state_slots.num_pages
        self.cache = drafter.make_cache(pages, cache.page_size, device, state_slots=state_slots)

    @torch.inference_mode()
    def __call__(
        self, sequences: Sequence[Running], taken: Sequence[Sequence[int]], states: torch.Tensor
    ) -> list[list[int]]:
        """Return the drafts of each sequence. taken: the tokens that each sequence has got from the verifying pass;
        states: of that pass, [B * (1 + drafts), ...]."""
        self._row = states[0]
        pages = -(-(max(len(s.tokens) for s in sequences) + self._drafts) // self._page_size)
        found = self._step(
            len(sequences), pages, lambda inputs: inputs.fill_after(sequences, taken, states, self._padding)
        )
        return found[: len(sequences)].tolist()

    @torch.inference_mode()
    def after_prompts(self, sequences: Sequence[Running], states: torch.Tensor) -> list[list[int]]:
        """Return the drafts after prompts and their first tokens. states: the drafter's, [B, ...], at the prompts'
        ends."""
        pages = max(-(-(len(s.tokens) + self._drafts) // self._page_size) for s in sequences)
        inputs = DecodeInputs(len(sequences), pages, self._page_size, self._device)
        inputs.hold(sequences, self._padding)
        packing.write(inputs.key_lens, [len(s.tokens) for s in sequences])
        return self._further(states, inputs).tolist()

    def _inputs(self, count: int, pages: int) -> DraftInputs:
        return DraftInputs(count, pages, self._page_size, self._device, self._drafts, self._row)

    def _run(self, inputs: DraftInputs) -> torch.Tensor:
        lens = inputs.key_lens - inputs.taken + self._drafts  # of the verifying pass
        states = self._drafter(inputs.tokens, inputs.states, inputs.batch(lens), self.cache)
        firsts = torch.arange(0, len(inputs.tokens), inputs.next_n, device=self._device)
        return self._further(states[firsts + inputs.taken - 1], inputs)

    def _further(self, states: torch.Tensor, inputs: DecodeInputs) -> torch.Tensor:
        """Return int64 [B, drafts]. states: the drafter's, [B, ...], at the token before each sequence's last one."""
        found = [self._drafter.logits(states).argmax(-1)]
        for i in range(self._drafts - 1):
            states = self._drafter(found[-1], states, inputs.one_each(inputs.key_lens + i), self.cache)
            found.append(self._drafter.logits(states).argmax(-1))
        return torch.stack(found, 1)


class Passes:
    """caches: the model's, and the drafter's if there is one. They have the same pages and state slots."""

    def __init__(self, model: Model, cache: Cache, options: EngineOptions) -> None:
        self._model, self._cache, self._options = model, cache, options
        self._device = next(model.parameters()).device
        drafts, capture = options.draft_tokens, options.cuda_graphs and model.captures_decode
        self._decode = DecodeStep(model, cache, drafts=drafts, capture=capture, invariant=options.batch_invariant)
        self._draft: DraftStep | None = None
        self.caches = [cache]
        if drafts:
            of_model = model.drafter, cache, drafts, self._decode.padding, self._device
            self._draft = DraftStep(*of_model, capture=capture)
            self.caches.append(self._draft.cache)

    def warm_up(self, count: int, pages: int) -> None:
        """Capture the passes of this many sequences of this many pages, if passes are captured."""
        if self._decode.captures:
            sequences = [self._decode.padding.longer(pages * self._cache.page_size)] * count
            _, states = self._decode(sequences)
            if self._draft is not None:
                self._draft(sequences, [[0]] * count, states)

    def prefill(self, work: Sequence[tuple[RunningSequence, int]]) -> list[TokenEvent]:
        """Compute the given number of next tokens of each prompt. Return the first new token of each sequence whose
        prompt ends in this pass."""
        chunks = [Chunk(n, s.cached, s.pages, s.state_slot) for s, n in work]
        batch = prefill_batch(chunks, self._cache.page_size, self._device)
        tokens = self._packed([s.tokens[s.cached : s.cached + n] for s, n in work])
        with batch_invariant("prompt" if self._options.batch_invariant else None):
            if self._draft is None:
                logits = self._model(tokens, batch, self._cache)
            else:
                states = self._model.states(tokens, batch, self._cache)
                logits = self._model.logits(states[batch.last_tokens])
        for s, n in work:
            s.cached += n
        rows = [row for row, (s, _) in enumerate(work) if not s.prefilling]
        ready = [work[row][0] for row in rows]
        events = []
        if ready:
            logits = logits if len(rows) == len(work) else logits[rows]
            events = [event for own in _taken(ready, logits[:, None]) for event in own]
        if self._draft is not None:
            # The token after each of the pass's. A sequence that has ended has none after its last one, and gets 0.
            after = self._packed([[*s.tokens[s.cached - n + 1 : s.cached + 1], 0][:n] for s, n in work])
            states = self._model.drafter(after, states, batch, self._draft.cache)
            if ready:
                for s, drafts in zip(ready, self._draft.after_prompts(ready, states[batch.last_tokens[rows]])):
                    s.drafts = drafts
        return events

    def extend(self, sequences: Sequence[RunningSequence], throughput: Throughput) -> list[TokenEvent]:
        """Run a decoding pass. Return the events of one new token per sequence and of the drafts that the model
        accepts. Count drafts and accepted drafts in `throughput`."""
        logits, states = self._decode(sequences)
        events = _taken(sequences, logits)
        for s in sequences:
            s.cached = len(s.tokens) - 1
        if self._draft is not None:
            taken = [[event.token for event in own if event.token is not None] for own in events]
            throughput.drafted += self._options.draft_tokens * len(sequences)
            throughput.taken += sum(max(len(own) - 1, 0) for own in taken)
            if any(own[-1].finish_reason is None for own in events):
                for s, drafts in zip(sequences, self._draft(sequences, taken, states)):
                    s.drafts = drafts
        return [event for own in events for event in own]

    def _packed(self, tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        return packing.to_device([token for own in tokens for token in own], torch.int64, self._device)


def _taken(sequences: Sequence[RunningSequence], logits: torch.Tensor) -> list[list[TokenEvent]]:
    """Return the events of the tokens that follow each sequence. logits [B, n, vocab_size]: as for `sample`."""
    chosen = sample(penalised(logits, sequences), sequences)
    events = []
    for s, row, tokens in zip(sequences, logits, chosen):
        logprobs = []
        if s.params.logprobs is not None:
            logprobs = logprobs_of(row, [token for token in tokens if token is not None], s.params.logprobs)
        events.append(s.take(tokens, logprobs))
    return events
