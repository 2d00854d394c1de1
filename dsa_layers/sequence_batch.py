"""Which tokens a forward pass computes: packed new tokens of several sequences, and where their keys are."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

import dsa
from dsa_layers.entry_batch import EntryBatch
from dsa_layers.window_batch import WindowBatch


@dataclass(frozen=True)
class SequenceBatch:
    """T new tokens of B sequences, packed one sequence after the other without padding.

    query_lens   new tokens of each sequence, at least 1 each; T is their sum
    key_lens     tokens of each sequence after this pass, cached ones and new ones: the new ones are the last
    device       where the tensors below live
    block_table  int32 [B, max_pages]: physical pages of each sequence, -1 beyond its end; None without a cache
    page_size    tokens a page; 0 without a cache
    lanes        of each sequence the number of its part of what a cache keeps by sequence, not by page; None: the cache
                 keeps nothing so

    Lengths are host numbers, so that no layer needs to ask the device for one.
    """

    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    device: torch.device
    block_table: torch.Tensor | None = None
    page_size: int = 0
    lanes: tuple[int, ...] | None = None

    @classmethod
    def without_cache(cls, lens: Sequence[int], device: torch.device | str = "cpu") -> "SequenceBatch":
        """Whole sequences of these lengths, all of whose tokens are new."""
        return cls(_positive("lens", lens), tuple(lens), torch.device(device))

    @classmethod
    def paged(
        cls,
        query_lens: Sequence[int],
        key_lens: Sequence[int],
        pages: Sequence[Sequence[int]],
        page_size: int,
        device: torch.device | str = "cpu",
        lanes: Sequence[int] | None = None,
    ) -> "SequenceBatch":
        """New tokens of sequences whose keys live in `pages` (physical page numbers, one list a sequence)."""
        _positive("query_lens", query_lens)
        if lanes is not None and (len(lanes) != len(query_lens) or len(set(lanes)) != len(lanes)):
            raise ValueError(f"lanes: must be {len(query_lens)} different numbers, one a sequence, got {list(lanes)}")
        if not len(query_lens) == len(key_lens) == len(pages):
            raise ValueError(
                f"query_lens, key_lens, pages: must have one entry a sequence, got {len(query_lens)}, "
                f"{len(key_lens)} and {len(pages)}"
            )
        for i, (new, total, own) in enumerate(zip(query_lens, key_lens, pages)):
            if total < new or len(own) * page_size < total:
                raise ValueError(
                    f"key_lens[{i}]: must be between query_lens[{i}]={new} and the {len(own) * page_size} tokens of "
                    f"its pages, got {total}"
                )
        width = max(map(len, pages), default=0)
        table = torch.tensor([[*own, *[-1] * (width - len(own))] for own in pages], dtype=torch.int32)
        device = torch.device(device)
        table = table.reshape(len(pages), width).to(device)
        lanes = None if lanes is None else tuple(lanes)
        return cls(tuple(query_lens), tuple(key_lens), device, table, page_size, lanes)

    @property
    def is_decode(self) -> bool:
        """One new token each."""
        return all(n == 1 for n in self.query_lens)

    @property
    def max_key_len(self) -> int:
        return max(self.key_lens, default=0)

    @cached_property
    def positions(self) -> torch.Tensor:
        """int64 [T]: each new token's position in its sequence."""
        spans = [torch.arange(total - new, total) for new, total in zip(self.query_lens, self.key_lens)]
        return self._packed(spans)

    @cached_property
    def sequences(self) -> torch.Tensor:
        """int32 [T]: the sequence of each new token."""
        return torch.repeat_interleave(torch.tensor(self.query_lens)).to(self.device, torch.int32)

    @cached_property
    def slots(self) -> torch.Tensor:
        """int64 [T]: page * page_size + offset of each new token in the cache."""
        return self._slots_of(self.sequences, self.positions)

    @cached_property
    def key_slots(self) -> torch.Tensor:
        """int64 [sum(key_lens)]: the slots of all keys, sequence after sequence."""
        sequence = torch.repeat_interleave(torch.tensor(self.key_lens)).to(self.device)
        return self._slots_of(sequence, self._packed([torch.arange(n) for n in self.key_lens]))

    @cached_property
    def key_lens_tensor(self) -> torch.Tensor:
        """int32 [B]: key_lens on the device."""
        return torch.tensor(self.key_lens, dtype=torch.int32, device=self.device)

    @cached_property
    def cu_query_lens(self) -> torch.Tensor:
        """int32 [B + 1]: where the sequences' new tokens begin among the T."""
        return torch.tensor([0, *self.query_lens]).cumsum(0).to(self.device, torch.int32)

    @cached_property
    def earlier_lens_tensor(self) -> torch.Tensor:
        """int32 [B]: tokens of each sequence before the new ones."""
        earlier = [total - new for new, total in zip(self.query_lens, self.key_lens)]
        return torch.tensor(earlier, dtype=torch.int32, device=self.device)

    @cached_property
    def lanes_tensor(self) -> torch.Tensor:
        """int32 [B]: lanes on the device."""
        if self.lanes is None:
            raise ValueError("lanes: are needed by this model's cache, got None")
        return torch.tensor(self.lanes, dtype=torch.int32, device=self.device)

    def entries(self, ratio: int) -> EntryBatch:
        """The compressed entries of every `ratio` tokens: one view for all layers of the pass."""
        return self._views.setdefault(("entries", ratio), EntryBatch(self, ratio))

    def windows(self, window: int) -> WindowBatch:
        """The sliding windows of so many tokens: one view for all layers of the pass."""
        return self._views.setdefault(("windows", window), WindowBatch(self, window))

    @cached_property
    def _views(self) -> dict[tuple[str, int], EntryBatch | WindowBatch]:
        return {}

    @cached_property
    def index_schedule(self) -> torch.Tensor:
        """The plan of `dsa.fp8_paged_mqa_logits` for these lengths: one for all layers of the pass."""
        return dsa.get_paged_mqa_logits_metadata(self.key_lens_tensor, self.page_size, dsa.num_sms(self.device))

    @cached_property
    def mla_schedule(self) -> dsa.FlashMLASchedMeta:
        """The plan of `dsa.flash_mla_with_kvcache` over all keys: the first layer of the pass makes it, all use it."""
        return dsa.get_mla_metadata()[0]

    @cached_property
    def key_starts(self) -> torch.Tensor:
        """int32 [T]: for each new token, the row at which its sequence begins among all keys packed."""
        starts = torch.cumsum(torch.tensor((0, *self.key_lens[:-1])), 0)
        return torch.repeat_interleave(starts, torch.tensor(self.query_lens)).to(self.device, torch.int32)

    @cached_property
    def visible_keys(self) -> torch.Tensor:
        """int32 [T]: how many keys of its sequence each new token may see, itself included."""
        return (self.positions + 1).to(torch.int32)

    @cached_property
    def last_tokens(self) -> torch.Tensor:
        """int64 [B]: the row of each sequence's last token among the T."""
        return (torch.cumsum(torch.tensor(self.query_lens), 0) - 1).to(self.device)

    def _packed(self, spans: list[torch.Tensor]) -> torch.Tensor:
        return (torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64)).to(self.device)

    def _slots_of(self, sequence: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        page = self.block_table[sequence, position // self.page_size].long()
        return page * self.page_size + position % self.page_size


def _positive(name: str, lens: Sequence[int]) -> tuple[int, ...]:
    if any(n < 1 for n in lens):
        raise ValueError(f"{name}: every sequence needs at least one new token, got {list(lens)}")
    return tuple(lens)
