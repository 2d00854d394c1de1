"""The passes that give sequences their tokens: over chunks of prompts, and over one token of each sequence."""

from collections.abc import Sequence

import torch

from dsa_layers.batch import packing
from dsa_layers.batch.prefill import Chunk, prefill_batch
from dsa_layers.cache.cache import Cache
from dsa_layers.engine.batch_invariance import batch_invariant
from dsa_layers.generation.engine_options import EngineOptions
from dsa_layers.generation.requests import RunningSequence, Throughput, TokenEvent
from dsa_layers.generation.sampler import logprobs_of, penalised, sample
from dsa_layers.generation.steps import DecodeStep, DraftStep
from dsa_layers.models.protocols import Model


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
        """Return a token of every sequence, and those of its drafts that the model chooses too. Count the drafts."""
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
