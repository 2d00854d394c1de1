"""The timed passes of decoding with drafts: of a round at any depth, and of the drafter."""

from collections.abc import Callable
from typing import Any

import torch

from dsa.testing import bench
from dsa_bench.e2e.full_depth import experts_touched, first_layers
from dsa_bench.e2e.runs import Cached, fill
from dsa_layers.families.model import CheckpointModel
from dsa_layers.generation.captured_step import CapturedStep
from dsa_layers.generation.decode_step import DecodeStep
from dsa_layers.generation.draft_step import DraftStep

REPEATS = 20
SPARE = 1  # page and state slot for padding sequences


class DraftedDecoding:
    """`count` sequences of `context` tokens, the last `drafts` of them guesses, over caches of random numbers. All
    tokens of a pass differ.

    touched: how many experts of each mixture get tokens in a pass. The pass has run once.
    """

    def __init__(self, model: CheckpointModel, count: int, context: int, drafts: int) -> None:
        self._model, self._drafts, self._device = model, drafts, next(model.parameters()).device
        pages = -(-context // model.page_size)
        self._cache = model.make_cache(count * pages + SPARE, device=self._device, state_slots=count + SPARE)
        fill(self._cache)
        allocate, slots = self._cache.allocator.allocate, self._cache.state_slots.allocate(count)
        # The last token of a sequence in slot s is 1 + s.
        guesses = [tuple(1 + count + slot * drafts + i for i in range(drafts)) for slot in slots]
        self._sequences = [Cached(allocate(pages), slot, context - drafts, own) for slot, own in zip(slots, guesses)]
        self._step = _DecodesAgain(model, self._cache, drafts=drafts, capture=False)
        with experts_touched() as found:
            results = self._step(self._sequences)
        self.touched = [int(number) for number in found]
        self._states = results[1] if drafts else None

    def pass_ms(self, layers: int) -> float:
        """A pass of the first `layers` layers over each sequence's last token and its drafts."""
        with first_layers(self._model, layers):
            return _graph_ms(self._step.again)

    def drafting_ms(self) -> float:
        """The drafter's passes after a pass that accepted all drafts, and one token more: its layer and the head for
        each new draft."""
        arguments = self._model.drafter, self._cache, self._drafts, self._step.padding, self._device
        step = _DraftsAgain(*arguments, capture=False)
        fill(step.cache)
        taken = [[*sequence.drafts, sequence.tokens[-1]] for sequence in self._sequences]
        step(self._sequences, taken, self._states)
        return _graph_ms(step.again)


class _Again(CapturedStep[Any]):
    """A step whose pass can run again with the same inputs, without the host's work before it."""

    def _run(self, inputs: Any) -> Any:
        self._inputs = inputs
        return super()._run(inputs)

    @torch.inference_mode()
    def again(self) -> Any:
        return super()._run(self._inputs)


class _DecodesAgain(_Again, DecodeStep):
    pass


class _DraftsAgain(_Again, DraftStep):
    pass


def _graph_ms(call: Callable[[], Any]) -> float:
    """The median time of a call that is captured as in generation."""
    return bench({"call": call}, repeats=REPEATS, graph=True)["call"]
