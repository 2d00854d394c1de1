"""The positions and cache slots of compressed entries. A sequence has one for every `ratio` tokens."""

from dataclasses import dataclass

import torch

import dsa
from dsa_layers.batch import packing
from dsa_layers.batch.caching import cached_property
from dsa_layers.batch.counts import SelectedCounts


@dataclass(frozen=True)
class EntryView(SelectedCounts):
    """Entry i of a sequence stands for its tokens i * ratio to i * ratio + ratio - 1. It exists after the pass that
    computes the last of these tokens. A page of the cache has the entries of its tokens, page_size / ratio of them.

    batch: the `TokenBatch` of the tokens
    """

    batch: SelectedCounts
    ratio: int

    @property
    def page_size(self) -> int:
        """Entries per page."""
        return self.batch.page_size // self.ratio

    @property
    def lens(self) -> tuple[int, ...]:
        """Rows of each sequence where the entries of all sequences are packed."""
        return tuple(n // self.ratio for n in self.batch.key_lens)

    @property
    def most(self) -> int:
        """The largest number of entries that a sequence has after this pass."""
        return self.batch.max_key_len // self.ratio

    @cached_property
    def lens_tensor(self) -> torch.Tensor:
        """int32 [B]: entries of each sequence after this pass."""
        return self.batch.key_lens_tensor // self.ratio

    @property
    def next_n(self) -> int:
        return self.batch.next_n

    @property
    def least_visible(self) -> int:
        return self.batch.least_visible // self.ratio

    @cached_property
    def visible_keys(self) -> torch.Tensor:
        """int32 [T]: how many entries of its sequence each new token may see."""
        one_each = self.batch.is_decode and self.batch.next_n == 1
        return self.lens_tensor if one_each else self.batch.visible_keys // self.ratio

    @cached_property
    def starts(self) -> torch.Tensor:
        """int32 [T]: for each new token, the row at which its sequence begins among all packed entries."""
        return packing.repeated(packing.starts(self.lens), self.batch.query_lens, self.batch.device)

    @property
    def visible_ranges(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        """(starts, visible_keys, an upper bound of these): what each new token may see among all packed entries."""
        return self.starts, self.visible_keys, self.most

    @cached_property
    def rows(self) -> torch.Tensor:
        """int32 [T, most]: the rows of the entries of each new token's sequence among all packed entries. Those that
        the token may see, `selected_counts` of them, come first. Tokens of a single sequence share one row of memory.
        """
        columns = torch.arange(self.most, dtype=torch.int32, device=self.batch.device)
        if len(self.lens) == 1:
            return columns.expand(sum(self.batch.query_lens), -1)
        return self.starts[:, None] + columns

    @cached_property
    def positions(self) -> torch.Tensor:
        """int64 [T]: the position of the entry that each new token may complete, which is that of its first token."""
        return (self.batch.positions + (1 - self.ratio)).clamp_(min=0)

    @cached_property
    def slots(self) -> torch.Tensor:
        """int64 [T]: the slot of the entry that each new token completes; -1 for tokens that complete none."""
        batch = self.batch
        sequences = batch.block_table, batch.cu_query_lens, batch.key_lens_tensor
        return dsa.slot_mapping(*sequences, sum(batch.query_lens), self.page_size, ratio=self.ratio)

    @cached_property
    def all_slots(self) -> torch.Tensor:
        """int64 [sum(lens)]: the slots of all entries, sequence after sequence; -1 where there is no page."""
        bounds = packing.offsets(self.lens, self.batch.device)
        return dsa.slot_mapping(self.batch.block_table, bounds, None, sum(self.lens), self.page_size)

    def slots_of(self, indices: torch.Tensor) -> torch.Tensor:
        """int32 [T, K]: the slots of the entries `indices` [T, K] of each new token's sequence; -1 stays."""
        return packing.selected_slots(self.batch.block_table, self.page_size, self.batch.sequences, indices)

    @cached_property
    def slot_table(self) -> torch.Tensor:
        """int32 [B, next_n, most]: the slots of the entries that each sequence's last tokens may see, then -1."""
        slots = dsa.window_slots(self.batch.block_table, self.lens_tensor, 1, self.page_size, max(self.most, 1))
        if self.next_n == 1:
            return slots
        columns = torch.arange(slots.shape[2], dtype=torch.int32, device=self.batch.device)
        return torch.where(columns < self.visible_by_sequence[..., None], slots, -1)

    @cached_property
    def index_schedule(self) -> torch.Tensor:
        """The plan of `dsa.fp8_paged_mqa_logits` for these entries."""
        return dsa.get_paged_mqa_logits_metadata(self.lens_tensor, self.page_size, dsa.num_sms(self.batch.device))

    @property
    def sequences(self) -> torch.Tensor:
        return self.batch.sequences
