"""Where a pass's sliding windows are: a ring of slots for each sequence, which holds its last tokens."""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

import dsa

if TYPE_CHECKING:
    from dsa_layers.batch.token_batch import TokenBatch


@dataclass(frozen=True)
class WindowBatch:
    """A token sees the last `window` tokens up to itself. The token at position p is in slot p mod window of the ring,
    which is page lanes[b] of the cache."""

    batch: "TokenBatch"
    window: int

    @cached_property
    def slots(self) -> torch.Tensor:
        """int64 [T]: each new token's slot; -1 for tokens that later ones of this pass overwrite."""
        batch = self.batch
        ends = batch.key_lens_tensor[batch.sequences.long()]
        kept = batch.positions >= ends - self.window
        slots = batch.lanes_tensor[batch.sequences.long()].long() * self.window + batch.positions % self.window
        return torch.where(kept, slots, -1)

    @cached_property
    def decode_slots(self) -> torch.Tensor:
        """int32 [B, 1, window]: the slots that the only new token of each sequence sees."""
        pages = -(-self.batch.max_key_len // self.window)
        table = self.batch.lanes_tensor[:, None].expand(-1, max(pages, 1))
        return dsa.window_slots(table, self.batch.key_lens_tensor, 1, self.window, self.window)

    @property
    def earlier_lens(self) -> tuple[int, ...]:
        """Tokens before the new ones that some of these see, of each sequence."""
        pairs = zip(self.batch.query_lens, self.batch.key_lens)
        return tuple(min(total - new, self.window - 1) for new, total in pairs)

    @cached_property
    def earlier_slots(self) -> torch.Tensor:
        """int64 [sum(earlier_lens)]: their slots, ascending by position."""
        spans = []
        lens = zip(self.batch.lanes or (), self.batch.query_lens, self.batch.key_lens, self.earlier_lens)
        for lane, new, total, earlier in lens:
            positions = torch.arange(total - new - earlier, total - new, device="cpu")
            spans.append(lane * self.window + positions % self.window)
        return (torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64, device="cpu")).to(self.batch.device)

    @cached_property
    def order(self) -> torch.Tensor:
        """int64 [sum(earlier_lens) + T]: the rows of (earlier tokens, new tokens) sequence by sequence."""
        rows, early, new = [], 0, sum(self.earlier_lens)
        for before, n in zip(self.earlier_lens, self.batch.query_lens):
            rows += [torch.arange(a, a + b, device="cpu") for a, b in ((early, before), (new, n))]
            early, new = early + before, new + n
        return torch.cat(rows).to(self.batch.device)

    @cached_property
    def cu_keys(self) -> torch.Tensor:
        """int32 [B + 1]: where the sequences begin in that order."""
        lens = [before + n for before, n in zip(self.earlier_lens, self.batch.query_lens)]
        return torch.tensor([0, *lens], dtype=torch.int64, device="cpu").cumsum(0).to(self.batch.device, torch.int32)

    @cached_property
    def indices(self) -> torch.Tensor:
        """int32 [T, window]: the rows of that order that each new token sees."""
        batch = self.batch
        return dsa.window_indices(batch.cu_query_lens, self.cu_keys, sum(batch.query_lens), self.window)
