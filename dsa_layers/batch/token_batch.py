"""What layers read of a pass's tokens, whether their lengths are on the host or on the device."""

from functools import cached_property
from typing import Any, Self

import torch

import dsa
from dsa_layers.batch import packing
from dsa_layers.batch.counts import SelectedCounts
from dsa_layers.batch.entry_view import EntryView
from dsa_layers.batch.group_rows import GroupRows
from dsa_layers.batch.tokens import Tokens
from dsa_layers.batch.window_view import WindowView


class TokenBatch(SelectedCounts, Tokens):
    """T new tokens of B sequences and where their keys are. What follows from these is computed once for all layers of
    a pass, when it is first read: slots, schedules, and views of compressed entries and of sliding windows."""

    @classmethod
    def unchecked(cls, **fields: Any) -> Self:
        """A batch of these fields, around the constructor's checks: for who has made them, in every step."""
        batch = object.__new__(cls)
        vars(batch).update(fields)
        return batch

    @cached_property
    def slots(self) -> torch.Tensor:
        """int64 [T]: page * page_size + offset of each new token in the cache."""
        return dsa.slot_mapping(
            self.block_table, self.cu_query_lens, self.key_lens_tensor, sum(self.query_lens), self.page_size
        )

    @cached_property
    def visible_keys(self) -> torch.Tensor:
        """int32 [T]: how many keys of its sequence each new token may see, itself included."""
        return (self.positions + 1).to(torch.int32)

    @cached_property
    def key_starts(self) -> torch.Tensor:
        """int32 [T]: for each new token, the row at which its sequence begins among all keys packed."""
        return packing.repeated(packing.starts(self.key_lens), self.query_lens, self.device)

    @property
    def visible_ranges(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        """(key_starts, visible_keys, an upper bound of these): what each new token may see among all keys packed."""
        return self.key_starts, self.visible_keys, self.max_key_len

    @cached_property
    def cu_key_lens(self) -> torch.Tensor:
        """int32 [B + 1]: where the sequences' keys begin where they are packed."""
        return packing.offsets(self.key_lens, self.device)

    @cached_property
    def key_slots(self) -> torch.Tensor:
        """int64 [sum(key_lens)]: the slots of all keys, sequence after sequence; -1 where it has no page."""
        return dsa.slot_mapping(self.block_table, self.cu_key_lens, None, sum(self.key_lens), self.page_size)

    def slots_of(self, indices: torch.Tensor) -> torch.Tensor:
        """int32 [T, K]: the slots of the keys at positions `indices` [T, K] of each new token's sequence; -1 stays."""
        return packing.selected_slots(self.block_table, self.page_size, self.sequences, indices)

    @cached_property
    def index_schedule(self) -> torch.Tensor:
        """The plan of `dsa.fp8_paged_mqa_logits` for these lengths: one for all layers of the pass."""
        return dsa.get_paged_mqa_logits_metadata(self.key_lens_tensor, self.page_size, dsa.num_sms(self.device))

    @cached_property
    def mla_schedule(self) -> dsa.FlashMLASchedMeta:
        """The plan of `dsa.flash_mla_with_kvcache` over all keys: the first layer of the pass makes it, all use it."""
        return dsa.get_mla_metadata()[0]

    def entries(self, ratio: int) -> EntryView:
        """The compressed entries of every `ratio` tokens: one view for all layers of the pass."""
        return self._views.setdefault(("entries", ratio), EntryView(self, ratio))

    def windows(self, window: int, ring: int) -> WindowView:
        """The sliding windows of so many tokens, in rings of so many slots: one view for all layers of the pass.
        ValueError for more tokens to decode than a ring has room for beside what the first of them sees."""
        most = ring - window + 1
        if self.next_n > most:
            raise ValueError(f"batch: next_n must be at most {most} with this cache, got {self.next_n}")
        return self._views.setdefault(("windows", window, ring), WindowView(self, window, ring))

    def group_rows(self, groups: int, tokens: int) -> GroupRows:
        """The rows of so many groups of channels of so many of the new tokens: for all layers of the pass."""
        key = "groups", groups, tokens
        if key not in self._views:
            self._views[key] = GroupRows.of(tokens, groups, self.device)
        return self._views[key]

    @cached_property
    def _views(self) -> dict[tuple[str | int, ...], EntryView | WindowView | GroupRows]:
        return {}
