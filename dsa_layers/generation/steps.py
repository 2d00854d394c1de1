"""The passes of an engine: prefill passes over chunks of prompts, and decoding passes over running sequences. On a GPU,
decoding passes can be captured as CUDA graphs, one graph per size."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch

from dsa.parallel.one_shot_sum import check_ranks
from dsa_layers.batch import packing
from dsa_layers.batch.decode_batch import DecodeInputs, Running
from dsa_layers.batch.sequence_batch import Chunk, prefill_batch
from dsa_layers.cache.kv_cache import Cache
from dsa_layers.engine.fp32_product import batch_invariant
from dsa_layers.generation.engine_options import EngineOptions
from dsa_layers.generation.requests import RunningSequence, Throughput, TokenEvent
from dsa_layers.generation.sampler import logprobs_of, penalised, sample
from dsa_layers.models.protocols import Drafter, Model

Inputs = TypeVar("Inputs", bound=DecodeInputs)


class CapturedStep(Generic[Inputs]):
    """A pass over running sequences, captured as a CUDA graph if `captures`. The size of a captured pass is the number
    of sequences and the number of pages of the longest sequence, each rounded up to a power of two. The first pass of a
    size is captured, and later passes replay the graph. The first pass runs twice, so a repeated pass must write the
    same values to the same addresses. The next pass overwrites the results.

    captures  whether passes are captured. The attribute of this name is always False on a CPU

    A subclass defines two methods: `_inputs(count, pages)` creates the input tensors of a size, and `_run(inputs)` runs
    the pass.
    """

    def __init__(self, device: torch.device, captures: bool) -> None:
        self._device, self.captures = device, captures and device.type == "cuda"
        self._graphs: dict[tuple[int, int], tuple[Inputs, torch.cuda.CUDAGraph, Any]] = {}

    def _step(self, count: int, pages: int, fill: Callable[[Inputs], None]) -> Any:
        """Run a pass over `count` sequences of at most `pages` pages each, and return its results. A captured pass can
        be larger; its results then have rows of padding at the end.

        fill  a function that writes to the input tensors, which may have room for more sequences and pages
        """
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
        check_ranks()  # raise here if a rank is lost: sums over ranks cannot, because a replay runs no Python code
        fill(inputs)
        graph.replay()
        return results

    def _capture(self, inputs: Inputs) -> tuple[torch.cuda.CUDAGraph, Any]:
        """Capture the pass and return its graph and results. The pass runs once before the capture, so that kernels are
        compiled and libraries initialised."""
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            self._run(inputs)
        torch.cuda.current_stream(self._device).wait_stream(side)
        gc.collect()  # if the collector destroyed an old graph during the capture, the capture would fail
        graph = torch.cuda.CUDAGraph()
        # All graphs share one pool: one graph runs at a time, and its results are read before the next graph runs.
        pool = next((g.pool() for _, g, _ in self._graphs.values()), None)
        with torch.cuda.graph(graph, pool=pool):
            results = self._run(inputs)
        return graph, results


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def powers_of_two(most: int) -> list[int]:
    """Return the powers of two from `power_of_two(most)` down to 1."""
    return [1 << i for i in reversed(range((most - 1).bit_length() + 1))]


@dataclass
class Padding:
    """A sequence that pads a batch. No request uses its pages and state slot."""

    tokens: list[int]
    drafts: list[int]
    pages: list[int]
    state_slot: int


class DecodeStep(CapturedStep[DecodeInputs]):
    """The model's pass over the last token and the drafts of each of B sequences.

    A call with sequences returns (logits, states). logits, fp32 [B, 1 + drafts, vocab_size], predict the token after
    each of these tokens. states, [B * (1 + drafts), ...], are the model's states at these tokens, or None without
    drafts.

    drafts     the number of drafts of each sequence
    capture    whether to capture the pass. Passes on a CPU and of a model without captures_decode are never captured
    invariant  whether a sequence's results are independent of other sequences and of the number of drafts, bit for bit
    padding    attribute: the sequence that pads batches. The constructor allocates its pages and state slot
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
        pages = cache.allocator.allocate(-(-(1 + drafts) // cache.page_size))
        self.padding = Padding([0], [0] * drafts, pages, *cache.state_slots.allocate(1))

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
    """The input tensors of a drafting pass, which follows a verifying pass (`DecodeStep`).

    tokens    int64 [count * (1 + drafts)]: the token after each position of the verifying pass, or 0 after the last
              accepted draft
    states    [count * (1 + drafts), ...]: the model's states at these positions
    taken     int32 [count]: the number of tokens that each sequence gained in the verifying pass, at least 1
    key_lens  int32 [count]: the number of tokens of each sequence after the verifying pass
    row       a state at one position, for the shape and dtype of `states`
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
        # A sequence that ended without a new token gets drafts too, but they are not used.
        packing.write(self.taken, [max(len(own), 1) for own in taken] + [1] * spare)
        # The padding has one token and gains one, so its length is 2.
        packing.write(self.key_lens, [len(s.tokens) for s in sequences] + [2] * spare)
        self.states[: len(states)] = states


class DraftStep(CapturedStep[DraftInputs]):
    """The drafter's passes. They greedily draft the next `drafts` tokens of each sequence, one after another. Call the
    object itself after a verifying pass (`DecodeStep`), and `after_prompts` after the drafter's pass over prompts.

    The parameter `cache` is the model's cache. The attribute `cache` is the drafter's cache, which has as many pages
    and state slots.
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
        """Return the drafts of each sequence.

        taken   the tokens that each sequence gained in the verifying pass
        states  [B * (1 + drafts), ...]: the model's states of the verifying pass
        """
        self._row = states[0]
        pages = -(-(max(len(s.tokens) for s in sequences) + self._drafts) // self._page_size)
        found = self._step(
            len(sequences), pages, lambda inputs: inputs.fill_after(sequences, taken, states, self._padding)
        )
        return found[: len(sequences)].tolist()

    @torch.inference_mode()
    def after_prompts(self, sequences: Sequence[Running], states: torch.Tensor) -> list[list[int]]:
        """Return the drafts of sequences that consist of a prompt and its first new token.

        states  [B, ...]: the drafter's states at the last token of each prompt
        """
        pages = max(-(-(len(s.tokens) + self._drafts) // self._page_size) for s in sequences)
        inputs = DecodeInputs(len(sequences), pages, self._page_size, self._device)
        inputs.hold(sequences, self._padding)
        packing.write(inputs.key_lens, [len(s.tokens) for s in sequences])
        return self._further(states, inputs).tolist()

    def _inputs(self, count: int, pages: int) -> DraftInputs:
        return DraftInputs(count, pages, self._page_size, self._device, self._drafts, self._row)

    def _run(self, inputs: DraftInputs) -> torch.Tensor:
        lens = inputs.key_lens - inputs.taken + self._drafts  # lengths in the verifying pass, with drafts
        states = self._drafter(inputs.tokens, inputs.states, inputs.batch(lens), self.cache)
        firsts = torch.arange(0, len(inputs.tokens), inputs.next_n, device=self._device)
        return self._further(states[firsts + inputs.taken - 1], inputs)

    def _further(self, states: torch.Tensor, inputs: DecodeInputs) -> torch.Tensor:
        """Return the drafts, int64 [B, drafts].

        states  [B, ...]: the drafter's states at the token before each sequence's last token
        inputs  the inputs of the sequences; `tokens` is not read
        """
        found = [self._drafter.logits(states).argmax(-1)]
        for i in range(self._drafts - 1):
            states = self._drafter(found[-1], states, inputs.one_each(inputs.key_lens + i), self.cache)
            found.append(self._drafter.logits(states).argmax(-1))
        return torch.stack(found, 1)


class Passes:
    """The prefill and decoding passes of an engine, with drafts if the options enable them.

    caches  the model's cache, and the drafter's cache if there is one, with as many pages and slots
    """

    def __init__(self, model: Model, cache: Cache, options: EngineOptions) -> None:
        self._model, self._cache, self._options = model, cache, options
        self._device = next(model.parameters()).device
        drafts, capture = options.draft_tokens, options.cuda_graphs and model.captures_decode
        self._decode = DecodeStep(model, cache, drafts=drafts, capture=capture, invariant=options.batch_invariant)
        self._draft: DraftStep | None = None
        if drafts:
            self._draft = DraftStep(model.drafter, cache, drafts, self._decode.padding, self._device, capture=capture)
        self.caches = [cache] if self._draft is None else [cache, self._draft.cache]

    def warm_up(self, count: int, pages: int) -> None:
        """Capture the passes over `count` sequences of `pages` pages each, if passes are captured."""
        if self._decode.captures:
            padding, tokens = self._decode.padding, pages * self._cache.page_size
            # This sequence repeats the first page of the padding, so the pass writes to no request's pages.
            longest = replace(padding, tokens=[0] * (tokens - len(padding.drafts)), pages=padding.pages[:1] * pages)
            sequences = [longest] * count
            _, states = self._decode(sequences)
            if self._draft is not None:
                self._draft(sequences, [[0]] * count, states)

    def prefill(self, work: Sequence[tuple[RunningSequence, int]]) -> list[tuple[RunningSequence, TokenEvent]]:
        """Run a pass over the next n prompt tokens of each (sequence, n) in `work`. Return (sequence, event) for the
        first new token of each sequence whose prompt ends in this pass."""
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
            events = _taken(ready, logits[:, None])
        if self._draft is not None:
            # The drafter reads the token after each token of this pass; 0 if a sequence ended without a new token.
            after = self._packed([[*s.tokens[s.cached - n + 1 : s.cached + 1], 0][:n] for s, n in work])
            states = self._model.drafter(after, states, batch, self._draft.cache)
            if ready:
                for s, drafts in zip(ready, self._draft.after_prompts(ready, states[batch.last_tokens[rows]])):
                    s.drafts = drafts
        return [(s, event) for s, own in zip(ready, events) for event in own]

    def extend(
        self, sequences: Sequence[RunningSequence], throughput: Throughput
    ) -> list[tuple[RunningSequence, TokenEvent]]:
        """Run a decoding pass, and compute the next drafts. Return (sequence, event) for each new token: the drafts
        that the model accepts, and then the model's next token. Update `throughput.drafted` and `throughput.taken`."""
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
        return [(s, event) for s, own in zip(sequences, events) for event in own]

    def _packed(self, tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        return packing.to_device([token for own in tokens for token in own], torch.int64, self._device)


def _taken(sequences: Sequence[RunningSequence], logits: torch.Tensor) -> list[list[TokenEvent]]:
    """Choose the next tokens of each sequence, add them to the sequence, and return their events. logits: as for
    `sample`."""
    chosen = sample(penalised(logits, sequences), sequences)
    events = []
    for s, row, tokens in zip(sequences, logits, chosen):
        logprobs = []
        if s.params.logprobs is not None:
            logprobs = logprobs_of(row, [token for token in tokens if token is not None], s.params.logprobs)
        events.append(s.take(tokens, logprobs))
    return events
