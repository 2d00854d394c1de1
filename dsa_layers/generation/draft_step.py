"""Drafts of the tokens to come, by a model's multi-token-prediction layer; on a GPU, a CUDA graph."""

from collections.abc import Sequence
from functools import partial

import torch

from dsa_layers.batch import packing
from dsa_layers.batch.decode_batch import DecodeBatch
from dsa_layers.batch.decode_inputs import PagedInputs
from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.cache.cache import Cache
from dsa_layers.families.drafter import Drafter
from dsa_layers.generation.captured_step import GRAPHS, CapturedStep
from dsa_layers.generation.decode_step import Padding
from dsa_layers.generation.running_sequence import RunningSequence


class DraftInputs(PagedInputs):
    """Those of a drafting pass.

    tokens [count * (1 + drafts)], states [count * (1 + drafts), ...]: of the positions that the pass before had, the
    tokens behind them and the target's states; taken [count]: how many of these tokens each sequence has got; key_lens
    [count]: its tokens with them.
    """

    def __init__(
        self, count: int, pages: int, page_size: int, device: torch.device, drafts: int, row: torch.Tensor
    ) -> None:
        super().__init__(count, pages, page_size, device)
        self.drafts = drafts
        self.tokens = torch.zeros(count * (1 + drafts), dtype=torch.int64, device=device)
        self.states = row.new_zeros(count * (1 + drafts), *row.shape)
        self.taken = torch.ones(count, dtype=torch.int32, device=device)

    def fill(
        self,
        sequences: Sequence[RunningSequence],
        taken: Sequence[Sequence[int]],
        states: torch.Tensor,
        padding: Padding,
    ) -> None:
        self.hold(sequences, padding)
        spare = self.count - len(sequences)
        behind = [[*own, *[0] * (1 + self.drafts - len(own))] for own in taken] + [[0] * (1 + self.drafts)] * spare
        packing.write(self.tokens, [token for own in behind for token in own])
        # One that ended without a token has its first row read all the same, and nobody asks for what comes of it.
        packing.write(self.taken, [max(len(own), 1) for own in taken] + [1] * spare)
        packing.write(self.key_lens, [len(s.tokens) for s in sequences] + [2] * spare)
        self.states[: len(states)] = states


class DraftStep(CapturedStep[DraftInputs]):
    """`drafts` tokens behind each sequence, the likeliest in the eyes of the drafter, one after another.

    cache: the target's, whose pages and state slots the drafter's own, the attribute `cache`, has, too. `prefill` is
    for passes over prompts, and computes what the drafter keeps of them; a call is for what comes behind a verifying
    pass (`DecodeStep`).
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
        graphs: int = GRAPHS,
    ) -> None:
        super().__init__(device, capture, graphs)
        self._drafter, self._drafts, self._padding, self._page_size = drafter, drafts, padding, cache.page_size
        pages, state_slots = cache.allocator.num_pages, cache.state_slots.num_pages
        self.cache = drafter.make_cache(pages, cache.page_size, device, state_slots=state_slots)

    @torch.inference_mode()
    def __call__(
        self, sequences: Sequence[RunningSequence], taken: Sequence[Sequence[int]], states: torch.Tensor
    ) -> list[list[int]]:
        """taken: the tokens that each sequence has got from the last pass, at its end; states: of that pass, [B * (1 +
        drafts), ...]."""
        pages = -(-(max(len(s.tokens) for s in sequences) + self._drafts) // self._page_size)
        found = self._of_size(len(sequences), pages, sequences, taken, states)
        return found[: len(sequences)].tolist()

    @torch.inference_mode()
    def warm_up(self, count: int, pages: int, states: torch.Tensor) -> None:
        """A step of `count` sequences of up to so many pages, all of them padding. states: of a pass of this size."""
        self._of_size(count, pages, [], [], states)

    def _of_size(
        self,
        count: int,
        pages: int,
        sequences: Sequence[RunningSequence],
        taken: Sequence[Sequence[int]],
        states: torch.Tensor,
    ) -> torch.Tensor:
        make = partial(DraftInputs, page_size=self._page_size, device=self._device, drafts=self._drafts, row=states[0])
        return self._step(count, pages, make, lambda inputs: inputs.fill(sequences, taken, states, self._padding))

    @torch.inference_mode()
    def prefill(self, tokens: torch.Tensor, states: torch.Tensor, batch: SequenceBatch) -> torch.Tensor:
        """The drafter's states [T, ...] for a pass over prompts: tokens [T] behind those of the batch, and the target's
        states [T, ...]."""
        return self._drafter(tokens, states, batch, self.cache)

    @torch.inference_mode()
    def behind(self, sequences: Sequence[RunningSequence], states: torch.Tensor) -> list[list[int]]:
        """Drafts behind prompts and their first tokens, of the drafter's states [B, ...] at the prompts' ends."""
        pages = max(-(-(len(s.tokens) + self._drafts) // self._page_size) for s in sequences)
        table = packing.to_device(packing.page_rows([s.pages for s in sequences], pages), torch.int32, self._device)
        slots = packing.to_device([s.state_slot for s in sequences], torch.int32, self._device)
        lens = packing.to_device([len(s.tokens) for s in sequences], torch.int32, self._device)
        return self._further(states, lens, table, slots, pages * self._page_size).tolist()

    def _run(self, inputs: DraftInputs) -> torch.Tensor:
        next_n = 1 + self._drafts
        table, slots = inputs.block_table, inputs.state_slots
        most = inputs.pages * self._page_size
        lens = inputs.key_lens - inputs.taken + self._drafts  # as the pass before had them
        batch = self._batch(table, lens, most, slots, next_n)
        states = self._drafter(inputs.tokens, inputs.states, batch, self.cache)
        firsts = torch.arange(0, inputs.count * next_n, next_n, device=self._device)
        return self._further(states[firsts + inputs.taken - 1], inputs.key_lens, table, slots, most)

    def _further(
        self, states: torch.Tensor, lens: torch.Tensor, table: torch.Tensor, slots: torch.Tensor, most: int
    ) -> torch.Tensor:
        """int64 [B, drafts], of the drafter's states [B, ...] before each sequence's last token."""
        found = [self._drafter.logits(states).argmax(-1)]
        for i in range(self._drafts - 1):
            batch = self._batch(table, lens + i, most, slots)
            states = self._drafter(found[-1], states, batch, self.cache)
            found.append(self._drafter.logits(states).argmax(-1))
        return torch.stack(found, 1)

    def _batch(
        self, table: torch.Tensor, lens: torch.Tensor, most: int, slots: torch.Tensor, next_n: int = 1
    ) -> DecodeBatch:
        of_cache = {"block_table": table, "page_size": self._page_size, "state_slots": slots}
        return DecodeBatch.unchecked(**of_cache, key_lens_tensor=lens, max_key_len=most, next_n=next_n)
