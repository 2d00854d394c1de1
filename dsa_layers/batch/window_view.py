"""The cache slots of sliding windows. Each sequence has a ring of slots, which stores its last tokens."""

from dataclasses import dataclass
from itertools import chain

import torch

import dsa
from dsa_layers.batch import packing
from dsa_layers.batch.selectable_keys import SelectableKeys, cached_property


@dataclass(frozen=True)
class WindowView:
    """The cache slots that the sliding windows of a batch read and write.

    A token sees the last `window` tokens, including itself. Sequence b has a ring of `ring` slots: page state_slots[b]
    of the cache. Slot p mod ring stores the token at position p. With a ring of window + K - 1 slots, a sequence can
    continue after any of its last K tokens, for example after rejected drafts.

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
        """int32 [B, next_n, window]: the slots that each new token of a decoding pass sees."""
        pages = -(-self.batch.max_key_len // self.ring)
        table = self.batch.state_slots_tensor[:, None].expand(-1, max(pages, 1))
        return dsa.window_slots(table, self.batch.key_lens_tensor, self.batch.next_n, self.ring, self.window)

    @property
    def earlier_lens(self) -> tuple[int, ...]:
        """For each sequence, the number of earlier tokens that at least one new token sees."""
        pairs = zip(self.batch.query_lens, self.batch.key_lens)
        return tuple(min(total - new, self.window - 1) for new, total in pairs)

    @cached_property
    def earlier_slots(self) -> torch.Tensor:
        """int64 [sum(earlier_lens)]: the slots of the visible earlier tokens, ordered by sequence and position."""
        batch, earlier = self.batch, self.earlier_lens
        rings, bounds = batch.state_slots_tensor[:, None], packing.offsets(earlier, batch.device)
        return dsa.slot_mapping(rings, bounds, batch.earlier_lens_tensor, sum(earlier), self.ring, ring=True)

    @property
    def in_order(self) -> bool:
        """Whether `order` is 0, 1, 2, ... This is so if no sequence after the first has earlier tokens."""
        return not any(self.earlier_lens[1:])

    @cached_property
    def order(self) -> torch.Tensor:
        """int64 [sum(earlier_lens) + T]: a permutation of the rows (all earlier tokens, all new tokens). It sorts the
        rows by sequence; within a sequence, earlier tokens precede new tokens."""
        earlier, new = self.earlier_lens, self.batch.query_lens
        first_new = sum(earlier)
        begins = list(chain(*zip(packing.starts(earlier), (first_new + row for row in packing.starts(new)))))
        ends = [begin + n for begin, n in zip(begins, chain(*zip(earlier, new)))]
        return packing.ranges(begins, ends, self.batch.device)

    @cached_property
    def cu_keys(self) -> torch.Tensor:
        """int32 [B + 1]: the first row of each sequence in the order of `order`, then the number of rows."""
        if not any(self.earlier_lens):
            return self.batch.cu_query_lens
        lens = [before + new for before, new in zip(self.earlier_lens, self.batch.query_lens)]
        return packing.offsets(lens, self.batch.device)

    @cached_property
    def indices(self) -> torch.Tensor:
        """int32 [T, window]: the rows that each new token sees, counted in the order of `order`."""
        batch = self.batch
        return dsa.window_indices(batch.cu_query_lens, self.cu_keys, sum(batch.query_lens), self.window)
