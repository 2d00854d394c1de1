"""Views of a batch: the compressed entries of its sequences, one per `ratio` tokens; the windows of its tokens; and the
rows of states of its sequences."""

from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch

import dsa
from dsa_layers.batch import packing
from dsa_layers.batch.selectable_keys import SelectableKeys, cached_property


@dataclass(frozen=True)
class EntryView(SelectableKeys):
    """The compressed entries of a batch's sequences.

    Entry i of a sequence belongs to the block of tokens i * ratio to i * ratio + ratio - 1. The pass over the last of
    these tokens computes the entry. A token may see the entries that it and earlier tokens complete.

    batch: the `TokenBatch` of the tokens; ratio: tokens per block
    """

    batch: SelectableKeys
    ratio: int

    @property
    def device(self) -> torch.device:
        return self.batch.device

    @property
    def block_table(self) -> torch.Tensor:
        return self.batch.block_table

    @property
    def query_lens(self) -> tuple[int, ...]:
        return self.batch.query_lens

    @property
    def page_size(self) -> int:
        """Entries per page."""
        return self.batch.page_size // self.ratio

    @property
    def key_lens(self) -> tuple[int, ...]:
        """Rows of each sequence in a tensor of all packed entries: at least its entries; more in some decoding
        passes."""
        return tuple(n // self.ratio for n in self.batch.key_lens)

    @property
    def max_key_len(self) -> int:
        """Upper bound of key_lens_tensor."""
        return self.batch.max_key_len // self.ratio

    @cached_property
    def key_lens_tensor(self) -> torch.Tensor:
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
        """int32 [T]: for each new token, the number of entries that the token may see."""
        one_each = self.batch.is_decode and self.batch.next_n == 1
        return self.key_lens_tensor if one_each else self.batch.visible_keys // self.ratio

    @cached_property
    def rows(self) -> torch.Tensor:
        """int32 [T, max_key_len]: for each new token, the rows of its sequence's entries among all packed entries. The
        first `visible_keys` columns are the entries that the token may see; the caller must ignore the others. If the
        batch has one sequence, the tensor is an expanded view of one row."""
        columns = torch.arange(self.max_key_len, dtype=torch.int32, device=self.batch.device)
        if len(self.key_lens) == 1:
            return columns.expand(sum(self.batch.query_lens), -1)
        return self.key_starts[:, None] + columns

    @cached_property
    def positions(self) -> torch.Tensor:
        """int64 [T]: for each new token that completes an entry, the position of the entry's first token. The values
        of other tokens have no meaning."""
        return (self.batch.positions + (1 - self.ratio)).clamp_(min=0)

    @cached_property
    def slots(self) -> torch.Tensor:
        """int64 [T]: the slot of the entry that each new token completes; -1 if the token completes no entry."""
        batch = self.batch
        sequences = batch.block_table, batch.cu_query_lens, batch.key_lens_tensor
        return dsa.slot_mapping(*sequences, sum(batch.query_lens), self.page_size, ratio=self.ratio)

    @cached_property
    def key_slots(self) -> torch.Tensor:
        """int64 [sum(key_lens)]: the slots of all entries, sequence after sequence; -1 for entries without a page."""
        bounds = packing.offsets(self.key_lens, self.batch.device)
        return dsa.slot_mapping(self.block_table, bounds, None, sum(self.key_lens), self.page_size)

    @cached_property
    def slot_table(self) -> torch.Tensor:
        """int32 [B, next_n, max(max_key_len, 1)], in a decoding pass: the slots of the entries that each new token may
        see, padded with -1."""
        slots = dsa.window_slots(
            self.batch.block_table, self.key_lens_tensor, 1, self.page_size, max(self.max_key_len, 1)
        )
        if self.next_n == 1:
            return slots
        columns = torch.arange(slots.shape[2], dtype=torch.int32, device=self.batch.device)
        return torch.where(columns < self.visible_by_sequence[..., None], slots, -1)

    @property
    def sequences(self) -> torch.Tensor:
        return self.batch.sequences


BLOCK_TOKENS = 1024  # the most new tokens of a `WindowBlocks` block


class WindowBlocks(NamedTuple):
    """The new tokens of a pass in blocks of consecutive tokens of a sequence. All tokens of a block attend to the same
    rows of keys, under a mask.

    rows       int64 [N]: the rows of the blocks' keys, block after block, counted after sorting by `WindowView.order`
    cu_tokens  int32 [blocks + 1]: the first new token of each block, then the number of new tokens
    cu_keys    int32 [blocks + 1]: where each block's keys begin in `rows`, then N
    most       the largest number of keys of a block
    bits       the mask, a result of `dsa.selection_bits`
    """

    rows: torch.Tensor
    cu_tokens: torch.Tensor
    cu_keys: torch.Tensor
    most: int
    bits: torch.Tensor


@dataclass(frozen=True)
class WindowView:
    """The cache slots that the sliding windows of a batch read and write.

    A token sees the last `window` tokens, including itself. Sequence b has a ring of `ring` slots: page
    state_slots_tensor[b] of the cache. Slot p mod ring has the key of position p, for the latest `ring` positions. With
    a ring of window + K - 1 slots, a sequence can continue after any of its last K tokens, so drafts can be rejected.

    batch: the `TokenBatch` of the tokens
    """

    batch: SelectableKeys
    window: int
    ring: int

    @cached_property
    def slots(self) -> torch.Tensor:
        """int64 [T]: the slot of each new token; -1 if a later token of this pass overwrites the slot."""
        batch = self.batch
        sequences = batch.state_slots_tensor[:, None], batch.cu_query_lens, batch.key_lens_tensor
        return dsa.slot_mapping(*sequences, sum(batch.query_lens), self.ring, ring=True)

    @cached_property
    def decode_slots(self) -> torch.Tensor:
        """int32 [B, next_n, window]: the slots that each new token of a decoding pass sees, padded with -1."""
        pages = -(-self.batch.max_key_len // self.ring)
        table = self.batch.state_slots_tensor[:, None].expand(-1, max(pages, 1))
        return dsa.window_slots(table, self.batch.key_lens_tensor, self.batch.next_n, self.ring, self.window)

    @property
    def earlier_lens(self) -> tuple[int, ...]:
        """For each sequence, the number of earlier tokens that new tokens see."""
        pairs = zip(self.batch.query_lens, self.batch.key_lens)
        return tuple(min(total - new, self.window - 1) for new, total in pairs)

    @cached_property
    def earlier_slots(self) -> torch.Tensor:
        """int64 [sum(earlier_lens)]: the slots of the tokens that `earlier_lens` counts, by sequence and position."""
        batch, earlier = self.batch, self.earlier_lens
        rings, bounds = batch.state_slots_tensor[:, None], packing.offsets(earlier, batch.device)
        return dsa.slot_mapping(rings, bounds, batch.earlier_lens_tensor, sum(earlier), self.ring, ring=True)

    @cached_property
    def before_slots(self) -> torch.Tensor:
        """int64 [B, window - 1]: the slots of the last tokens before each sequence's new tokens; -1 where a sequence
        has fewer tokens."""
        batch = self.batch
        steps = torch.arange(1 - self.window, 0, device=batch.device)
        positions = batch.earlier_lens_tensor.long()[:, None] + steps
        slots = batch.state_slots_tensor.long()[:, None] * self.ring + positions % self.ring
        return torch.where(positions < 0, -1, slots)

    @property
    def in_order(self) -> bool:
        """Whether `order` is 0, 1, 2, ...: no sequence after the first has earlier tokens in a window."""
        return not any(self.earlier_lens[1:])

    @cached_property
    def order(self) -> torch.Tensor:
        """int64 [sum(earlier_lens) + T]: row order[i] becomes row i. Before sorting, the earlier tokens of all
        sequences precede all new tokens. After sorting by sequence, each sequence's earlier tokens precede its new
        tokens."""
        earlier, new = self.earlier_lens, self.batch.query_lens
        first_new = sum(earlier)
        begins = list(chain(*zip(packing.starts(earlier), (first_new + row for row in packing.starts(new)))))
        ends = [begin + n for begin, n in zip(begins, chain(*zip(earlier, new)))]
        return packing.ranges(begins, ends, self.batch.device)

    @cached_property
    def cu_keys(self) -> torch.Tensor:
        """int32 [B + 1]: the first row of each sequence after sorting by `order`, then the number of rows."""
        if not any(self.earlier_lens):
            return self.batch.cu_query_lens
        lens = [before + new for before, new in zip(self.earlier_lens, self.batch.query_lens)]
        return packing.offsets(lens, self.batch.device)

    @cached_property
    def blocks(self) -> WindowBlocks:
        """The blocks of the new tokens. A block's keys are those that any of its tokens sees."""
        begins, ends, tokens, first = [], [], [], 0
        for earlier, new in zip(self.earlier_lens, self.batch.query_lens):
            for done in range(0, new, BLOCK_TOKENS):
                tokens.append(min(BLOCK_TOKENS, new - done))
                begins.append(first + max(earlier + done - self.window + 1, 0))
                ends.append(first + earlier + done + tokens[-1])
            first += earlier + new
        device, lens = self.batch.device, [end - begin for begin, end in zip(begins, ends)]
        most = max(lens, default=0)
        bits = dsa.selection_bits(self.indices, packing.repeated(begins, tokens, device), most)
        bounds = packing.offsets(tokens, device), packing.offsets(lens, device)
        return WindowBlocks(packing.ranges(begins, ends, device), *bounds, most, bits)

    @cached_property
    def indices(self) -> torch.Tensor:
        """int32 [T, window]: the rows, after sorting by `order`, that each new token sees, padded with -1."""
        batch = self.batch
        return dsa.window_indices(batch.cu_query_lens, self.cu_keys, sum(batch.query_lens), self.window)


@dataclass(frozen=True)
class StateView:
    """The rows of a tensor with states per sequence, which has `kept` rows per state slot. After n tokens of a
    sequence, its state is in row state_slot * kept + n mod kept. So a sequence can continue after any of the last
    `kept` - 1 tokens of a decoding pass, and this pass does not overwrite the state that it begins with.

    batch: the `TokenBatch` of the tokens
    """

    batch: SelectableKeys
    kept: int

    @cached_property
    def before(self) -> torch.Tensor:
        """int64 [B]: the row of the state before each sequence's new tokens."""
        return self._rows(self.batch.earlier_lens_tensor)

    @cached_property
    def is_new(self) -> torch.Tensor:
        """bool [B]: whether a sequence has no earlier tokens, so that its state is zero."""
        return self.batch.earlier_lens_tensor == 0

    @cached_property
    def after(self) -> tuple[torch.Tensor, ...]:
        """In a decoding pass, a tensor int64 [B] per new token of a sequence: the rows of the states after this token.
        Otherwise one tensor, for each sequence's last new token."""
        batch = self.batch
        if not batch.is_decode:
            return (self._rows(batch.key_lens_tensor),)
        return tuple(self._rows(batch.earlier_lens_tensor + n) for n in range(1, batch.next_n + 1))

    def _rows(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.batch.state_slots_tensor.long() * self.kept + tokens.long() % self.kept
