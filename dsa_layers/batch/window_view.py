"""The cache slots of sliding windows: each sequence has a ring of slots for its last tokens."""

from dataclasses import dataclass
from itertools import chain

import torch

import dsa
from dsa_layers.batch import packing
from dsa_layers.batch.selectable_keys import SelectableKeys, cached_property


@dataclass(frozen=True)
class WindowView:
    """The cache slots that the sliding windows of a batch read and write.

    A token sees the last `window` tokens, including itself. Each sequence has a ring of slots, which is page
    state_slots[b] of the cache. The token at position p is in slot p mod ring. A ring of window + K - 1 slots lets a
    sequence continue after any of its last K tokens, for example after rejected drafts.

    batch: the `TokenBatch` of the tokens
    """

    batch: SelectableKeys
    window: int
    ring: int

    @cached_property
    def slots(self) -> torch.Tensor:
        """int64 [T]: each new token's slot; -1 for tokens that later tokens of this pass overwrite."""
        batch = self.batch
        sequences = batch.state_slots_tensor[:, None], batch.cu_query_lens, batch.key_lens_tensor
        return dsa.slot_mapping(*sequences, sum(batch.query_lens), self.ring, ring=True)

    @cached_property
    def decode_slots(self) -> torch.Tensor:
        """int32 [B, next_n, window]: the slots that each sequence's last tokens see."""
        pages = -(-self.batch.max_key_len // self.ring)
        table = self.batch.state_slots_tensor[:, None].expand(-1, max(pages, 1))
        return dsa.window_slots(table, self.batch.key_lens_tensor, self.batch.next_n, self.ring, self.window)

    @property
    def earlier_lens(self) -> tuple[int, ...]:
        """For each sequence, the number of tokens before the new ones that some new token sees."""
        pairs = zip(self.batch.query_lens, self.batch.key_lens)
        return tuple(min(total - new, self.window - 1) for new, total in pairs)

    @cached_property
    def earlier_slots(self) -> torch.Tensor:
        """int64 [sum(earlier_lens)]: the slots of these earlier tokens, in the order of positions."""
        batch, earlier = self.batch, self.earlier_lens
        rings, bounds = batch.state_slots_tensor[:, None], packing.offsets(earlier, batch.device)
        return dsa.slot_mapping(rings, bounds, batch.earlier_lens_tensor, sum(earlier), self.ring, ring=True)

    @property
    def in_order(self) -> bool:
        """Whether `order` is 0, 1, 2, ...: only the first sequence has earlier tokens."""
        return not any(self.earlier_lens[1:])

    @cached_property
    def order(self) -> torch.Tensor:
        """int64 [sum(earlier_lens) + T]: the rows of (earlier tokens, new tokens) sequence by sequence."""
        earlier, new = self.earlier_lens, self.batch.query_lens
        first_new = sum(earlier)
        begins = list(chain(*zip(packing.starts(earlier), (first_new + row for row in packing.starts(new)))))
        ends = [begin + n for begin, n in zip(begins, chain(*zip(earlier, new)))]
        return packing.ranges(begins, ends, self.batch.device)

    @cached_property
    def cu_keys(self) -> torch.Tensor:
        """int32 [B + 1]: where each sequence begins among the rows in `order`."""
        if not any(self.earlier_lens):
            return self.batch.cu_query_lens
        lens = [before + new for before, new in zip(self.earlier_lens, self.batch.query_lens)]
        return packing.offsets(lens, self.batch.device)

    @cached_property
    def indices(self) -> torch.Tensor:
        """int32 [T, window]: the rows, in the order of `order`, that each new token sees."""
        batch = self.batch
        return dsa.window_indices(batch.cu_query_lens, self.cu_keys, sum(batch.query_lens), self.window)
