"""The tokens behind those of every running sequence; on a GPU, a CUDA graph."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from dsa_layers.batch.decode_inputs import DecodeInputs, Running
from dsa_layers.cache.cache import Cache
from dsa_layers.engine.batch_invariance import batch_invariant
from dsa_layers.families.model import Model
from dsa_layers.generation.captured_step import GRAPHS, CapturedStep


class Padding:
    """A sequence of one token, and drafts, that fills up a batch. It has pages and a state slot of its own."""

    def __init__(self, cache: Cache, drafts: int) -> None:
        self.tokens, self.drafts = [0], [0] * drafts
        self.pages = cache.allocator.allocate(-(-(1 + drafts) // cache.page_size))
        (self.state_slot,) = cache.state_slots.allocate(1)


class DecodeStep(CapturedStep[DecodeInputs]):
    """step(sequences): logits fp32 [B, vocab_size] of the token after each of B sequences.

    With `drafts`, as many of which each sequence has: (logits [B, 1 + drafts, vocab_size], of the token after the
    sequence, and after its drafts one by one; the model's states [B * (1 + drafts), ...] there).

    The sequences that fill up a batch write to pages and a state slot that are taken from the cache for them
    (`padding`). On a CPU, without `capture`, and for models whose decoding passes cannot be captured, the pass runs
    without a graph. invariant: what a sequence gets depends on no other one, and not on `drafts`, bit for bit. The next
    step overwrites the results.
    """

    def __init__(
        self,
        model: Model,
        cache: Cache,
        *,
        drafts: int = 0,
        capture: bool = True,
        invariant: bool = False,
        graphs: int = GRAPHS,
    ) -> None:
        super().__init__(next(model.parameters()).device, capture and model.captures_decode, graphs)
        self._model, self._cache, self._drafts, self._invariant = model, cache, drafts, invariant
        self.padding = Padding(cache, drafts)

    @torch.inference_mode()
    def __call__(self, sequences: Sequence[Running]) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        count, next_n = len(sequences), 1 + self._drafts
        pages = -(-(max(len(s.tokens) for s in sequences) + self._drafts) // self._cache.page_size)
        results = self._of_size(count, pages, sequences)
        if not self._drafts:
            return results[:count]
        logits, states = results
        return logits[: count * next_n].unflatten(0, (count, next_n)), states[: count * next_n]

    @torch.inference_mode()
    def warm_up(self, count: int, pages: int) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """A step of `count` sequences of up to so many pages, all of them padding."""
        return self._of_size(count, pages, [])

    def _of_size(self, count: int, pages: int, sequences: Sequence[Running]) -> Any:
        sizes = {"page_size": self._cache.page_size, "next_n": 1 + self._drafts}
        make = partial(DecodeInputs, device=self._device, **sizes)
        return self._step(count, pages, make, lambda inputs: inputs.fill(sequences, self.padding))

    def _run(self, inputs: DecodeInputs) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        with batch_invariant("decoding" if self._invariant else None):
            if not self._drafts:
                return self._model(inputs.tokens, inputs.batch(), self._cache)
            states = self._model.states(inputs.tokens, inputs.batch(), self._cache)
            return self._model.logits(states), states
