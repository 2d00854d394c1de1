"""The passes that give sequences their tokens: over chunks of prompts, and over one token of each sequence."""

from collections.abc import Sequence

import torch

from dsa_layers.batch import packing
from dsa_layers.batch.prefill import Chunk, prefill_batch
from dsa_layers.cache.cache import Cache
from dsa_layers.engine.batch_invariance import batch_invariant
from dsa_layers.families.model import Model
from dsa_layers.generation.captured_step import GRAPHS
from dsa_layers.generation.decode_step import DecodeStep
from dsa_layers.generation.draft_step import DraftStep
from dsa_layers.generation.logprobs import logprobs_of
from dsa_layers.generation.penalties import penalised
from dsa_layers.generation.results import Throughput, TokenEvent
from dsa_layers.generation.running_sequence import RunningSequence
from dsa_layers.generation.sampling import sample, sample_drafted


class Passes:
    """drafts: behind each sequence's last token, by the model's drafter; capture: decoding passes are CUDA graphs;
    invariant: as of `DecodeStep`; graphs: how many of these are kept, and as many of the drafter's."""

    def __init__(
        self,
        model: Model,
        cache: Cache,
        *,
        drafts: int,
        capture: bool,
        invariant: bool = False,
        graphs: int = GRAPHS,
    ) -> None:
        self._model, self._cache, self._drafts, self._invariant = model, cache, drafts, invariant
        self._device = next(model.parameters()).device
        options = {"drafts": drafts, "capture": capture, "invariant": invariant, "graphs": graphs}
        self._decode = DecodeStep(model, cache, **options)
        self._draft: DraftStep | None = None
        if drafts:
            arguments = model.drafter, cache, drafts, self._decode.padding, self._device
            self._draft = DraftStep(*arguments, capture=capture and model.captures_decode, graphs=graphs)

    @property
    def caches(self) -> list[Cache]:
        """The model's, and the drafter's if there is one: with the same pages and state slots."""
        return [self._cache] if self._draft is None else [self._cache, self._draft.cache]

    @property
    def captures(self) -> bool:
        """Whether decoding passes become CUDA graphs."""
        return self._decode.captures

    def warm_up(self, count: int, pages: int) -> None:
        """Capture the passes of so many sequences of up to so many pages."""
        results = self._decode.warm_up(count, pages)
        if self._draft is not None:
            _, states = results
            self._draft.warm_up(count, pages, states)

    def prefill(self, work: Sequence[tuple[RunningSequence, int]]) -> list[TokenEvent]:
        """A pass over the next tokens of prompts, so many of each; the first new token of each sequence whose prompt
        ends in it."""
        chunks = [Chunk(n, s.cached, s.pages, s.state_slot) for s, n in work]
        batch = prefill_batch(chunks, self._cache.page_size, self._device)
        tokens = packing.to_device(
            [t for s, n in work for t in s.tokens[s.cached : s.cached + n]], torch.int64, self._device
        )
        with batch_invariant("prompt" if self._invariant else None):
            if self._draft is None:
                logits = self._model(tokens, batch, self._cache)
            else:
                states = self._model.states(tokens, batch, self._cache)
                logits = self._model.logits(states[batch.last_tokens])
        for s, n in work:
            s.cached += n
        # Of a prompt that is not in the cache yet, nothing follows.
        ready = [(row, s) for row, (s, _) in enumerate(work) if not s.prefilling]
        events = []
        if ready:
            rows, sequences = map(list, zip(*ready))
            logits = logits if len(rows) == len(work) else logits[rows]
            events = [event for own in _taken(sequences, logits[:, None]) for event in own]
        if self._draft is not None:
            # The tokens behind the pass's: of a sequence without one, which has ended, any.
            behind = [[*s.tokens[s.cached - n + 1 : s.cached + 1], 0][:n] for s, n in work]
            behind = packing.to_device([token for own in behind for token in own], torch.int64, self._device)
            states = self._draft.prefill(behind, states, batch)
            if ready:
                for s, drafts in zip(sequences, self._draft.behind(sequences, states[batch.last_tokens[rows]])):
                    s.drafts = drafts
        return events

    def extend(self, sequences: Sequence[RunningSequence], throughput: Throughput) -> list[TokenEvent]:
        """A token for every sequence, and those of its drafts that the model chooses, too, which are counted."""
        if self._draft is None:
            events = _taken(sequences, self._decode(sequences)[:, None])
        else:
            logits, states = self._decode(sequences)
            events = _taken(sequences, logits)
        for s in sequences:
            s.cached = len(s.tokens) - 1
        if self._draft is not None:
            taken = [[event.token for event in own if event.token is not None] for own in events]
            throughput.drafted += self._drafts * len(sequences)
            throughput.taken += sum(max(len(own) - 1, 0) for own in taken)
            if any(own[-1].finish_reason is None for own in events):
                for s, drafts in zip(sequences, self._draft(sequences, taken, states)):
                    s.drafts = drafts
        return [event for own in events for event in own]


def _taken(sequences: Sequence[RunningSequence], logits: torch.Tensor) -> list[list[TokenEvent]]:
    """The events of the tokens that are chosen by logits [B, n, vocab_size]: after each sequence, and after its first 1
    to n - 1 drafts."""
    params, randoms = [s.params for s in sequences], [s.random for s in sequences]
    weighed = penalised(logits, sequences)
    if logits.shape[1] == 1:
        chosen = [[token] for token in sample(weighed[:, 0], params, randoms)]
    else:
        chosen = sample_drafted(weighed, [s.drafts for s in sequences], params, randoms)
    logprobs = logprobs_of(logits, chosen, [one.logprobs for one in params])
    return [s.take(tokens, own) for s, tokens, own in zip(sequences, chosen, logprobs)]
