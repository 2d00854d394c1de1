"""What layers ask of the tokens of a pass, whoever keeps the lengths."""

from functools import cached_property

import torch

import dsa
from dsa_layers.batch.entry_view import EntryBatch
from dsa_layers.batch.window_view import WindowBatch


class TokenBatch:
    """T new tokens of B sequences, and where their keys are.

    device               where the tensors live
    block_table          int32 [B, max_pages]: physical pages of each sequence, -1 beyond its end; None without a cache
    page_size            tokens a page; 0 without a cache
    query_lens           new tokens of each sequence
    key_lens             rows that each sequence's tokens take where keys are packed, cached ones and new ones: as many
                         as there are after this pass, or more. These lengths are host numbers, as shapes must be
    max_key_len          the most of these
    is_decode            whether every sequence has one new token
    positions            int64 [T]: each new token's position in its sequence
    sequences            int32 [T]: the sequence of each new token
    key_lens_tensor      int32 [B]: tokens of each sequence after this pass
    earlier_lens_tensor  int32 [B]: tokens of each sequence before the new ones
    cu_query_lens        int32 [B + 1]: where the sequences' new tokens begin among the T
    last_tokens          int64 [B]: the row of each sequence's last token among the T
    lanes_tensor         int32 [B]: the number of each sequence's part of what a cache keeps by sequence, not by page
    """

    device: torch.device
    block_table: torch.Tensor | None
    page_size: int
    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    max_key_len: int
    is_decode: bool
    positions: torch.Tensor
    sequences: torch.Tensor
    key_lens_tensor: torch.Tensor
    earlier_lens_tensor: torch.Tensor
    cu_query_lens: torch.Tensor
    last_tokens: torch.Tensor
    lanes_tensor: torch.Tensor

    @cached_property
    def slots(self) -> torch.Tensor:
        """int64 [T]: page * page_size + offset of each new token in the cache."""
        return self._slots_of(self.sequences, self.positions)

    @cached_property
    def visible_keys(self) -> torch.Tensor:
        """int32 [T]: how many keys of its sequence each new token may see, itself included."""
        return (self.positions + 1).to(torch.int32)

    @cached_property
    def key_starts(self) -> torch.Tensor:
        """int32 [T]: for each new token, the row at which its sequence begins among all keys packed."""
        starts = torch.cumsum(torch.tensor((0, *self.key_lens[:-1]), dtype=torch.int64, device="cpu"), 0)
        lens = torch.tensor(self.query_lens, dtype=torch.int64, device="cpu")
        return torch.repeat_interleave(starts, lens).to(self.device, torch.int32)

    @cached_property
    def key_slots(self) -> torch.Tensor:
        """int64 [sum(key_lens)]: the slots of all keys, sequence after sequence; -1 where it has no page."""
        sequence = torch.repeat_interleave(torch.tensor(self.key_lens, dtype=torch.int64, device="cpu")).to(self.device)
        return self._slots_of(sequence, self._packed([torch.arange(n, device="cpu") for n in self.key_lens]))

    @cached_property
    def index_schedule(self) -> torch.Tensor:
        """The plan of `dsa.fp8_paged_mqa_logits` for these lengths: one for all layers of the pass."""
        return dsa.get_paged_mqa_logits_metadata(self.key_lens_tensor, self.page_size, dsa.num_sms(self.device))

    @cached_property
    def mla_schedule(self) -> dsa.FlashMLASchedMeta:
        """The plan of `dsa.flash_mla_with_kvcache` over all keys: the first layer of the pass makes it, all use it."""
        return dsa.get_mla_metadata()[0]

    def entries(self, ratio: int) -> EntryBatch:
        """The compressed entries of every `ratio` tokens: one view for all layers of the pass."""
        return self._views.setdefault(("entries", ratio), EntryBatch(self, ratio))

    def windows(self, window: int) -> WindowBatch:
        """The sliding windows of so many tokens: one view for all layers of the pass."""
        return self._views.setdefault(("windows", window), WindowBatch(self, window))

    @cached_property
    def _views(self) -> dict[tuple[str, int], EntryBatch | WindowBatch]:
        return {}

    def _packed(self, spans: list[torch.Tensor]) -> torch.Tensor:
        return (torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64, device="cpu")).to(self.device)

    def _slots_of(self, sequence: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        page = self.block_table[sequence, position // self.page_size].long()
        return torch.where(page < 0, -1, page * self.page_size + position % self.page_size)
