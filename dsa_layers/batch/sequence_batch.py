"""Which tokens a forward pass computes: packed new tokens of several sequences, and where their keys are."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from dsa.runtime.checks import INT_MAX, torch_device
from dsa_layers.arguments import integer, shown
from dsa_layers.batch import packing
from dsa_layers.batch.checks import check_key_lens, check_of_sequences, distinct_slots, integers, positive
from dsa_layers.batch.token_batch import TokenBatch


@dataclass(frozen=True)
class SequenceBatch(TokenBatch):
    """T new tokens of B sequences, packed one sequence after the other without padding.

    query_lens   new tokens of each sequence, at least 1 each; T is their sum
    key_lens     tokens of each sequence after this pass, cached ones and new ones: the new ones are the last
    device       where the tensors below live
    block_table  int32 [B, max_pages]: physical pages of each sequence, -1 beyond its end; None without a cache
    page_size    tokens a page; 0 without a cache
    state_slots  each sequence's row of the tensors that a cache keeps by sequence and not by page; None where the cache
                 keeps nothing so

    Lengths are numbers on the host, so that no layer has to copy one from the device.
    Raises TypeError or ValueError that names the argument, for lengths that have no room in the table among others.
    What the table holds is not looked at: `paged` makes it of numbers that it has checked.
    """

    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    device: torch.device
    block_table: torch.Tensor | None = None
    page_size: int = 0
    state_slots: tuple[int, ...] | None = None

    next_n = 1

    def __post_init__(self) -> None:
        query_lens, key_lens = positive("query_lens", self.query_lens), integers("key_lens", self.key_lens)
        if len(query_lens) != len(key_lens):
            raise ValueError(
                f"query_lens, key_lens: must have one entry a sequence, got {len(query_lens)} and {len(key_lens)}"
            )
        device = torch_device("device", self.device)
        count, room = len(query_lens), None
        integer("page_size", self.page_size, at_least=0 if self.block_table is None else 1)
        if self.block_table is not None:
            check_of_sequences("block_table", self.block_table, count, device, "query_lens", "max_pages")
            room = [self.block_table.shape[1] * self.page_size] * count
        check_key_lens(query_lens, key_lens, room)
        slots = distinct_slots(self.state_slots, count)
        vars(self).update(query_lens=query_lens, key_lens=key_lens, device=device, state_slots=slots)

    @classmethod
    def without_cache(cls, lens: Sequence[int], device: torch.device | str = "cpu") -> "SequenceBatch":
        """Whole sequences of these lengths, all of whose tokens are new. [] is the batch of a rank without work."""
        lens = positive("lens", lens)
        return cls.unchecked(query_lens=lens, key_lens=lens, device=torch_device("device", device))

    @classmethod
    def paged(
        cls,
        query_lens: Sequence[int],
        key_lens: Sequence[int],
        pages: Sequence[Sequence[int]],
        page_size: int,
        device: torch.device | str = "cpu",
        state_slots: Sequence[int] | None = None,
    ) -> "SequenceBatch":
        """New tokens of sequences whose keys live in `pages` (physical page numbers, one list a sequence)."""
        query_lens, key_lens = positive("query_lens", query_lens), integers("key_lens", key_lens)
        if not isinstance(pages, Sequence):
            raise TypeError(f"pages: must be a list of pages for each sequence, got {shown(pages)}")
        pages = [integers(f"pages[{i}]", own) for i, own in enumerate(pages)]
        integer("page_size", page_size, at_least=1)
        if any(min(own, default=0) < 0 for own in pages):
            raise ValueError(f"pages: must be numbers of pages, at least 0, got {shown(pages)}")
        state_slots = distinct_slots(state_slots, len(query_lens))
        if not len(query_lens) == len(key_lens) == len(pages):
            raise ValueError(
                f"query_lens, key_lens, pages: must have one entry a sequence, got {len(query_lens)}, "
                f"{len(key_lens)} and {len(pages)}"
            )
        check_key_lens(query_lens, key_lens, [len(own) * page_size for own in pages])
        device = torch_device("device", device)
        return cls.unchecked(
            query_lens=query_lens,
            key_lens=key_lens,
            device=device,
            block_table=_table(pages, device),
            page_size=page_size,
            state_slots=state_slots,
        )

    @property
    def is_decode(self) -> bool:
        """One new token each."""
        return all(n == 1 for n in self.query_lens)

    @property
    def max_key_len(self) -> int:
        return max(self.key_lens, default=0)

    @property
    def least_visible(self) -> int:
        return min((total - new + 1 for new, total in zip(self.query_lens, self.key_lens)), default=0)

    @cached_property
    def positions(self) -> torch.Tensor:
        """int64 [T]: each new token's position in its sequence."""
        begins = [total - new for new, total in zip(self.query_lens, self.key_lens)]
        return packing.ranges(begins, self.key_lens, self.device)

    @cached_property
    def sequences(self) -> torch.Tensor:
        """int32 [T]: the sequence of each new token."""
        return packing.owners(self.query_lens, self.device)

    @cached_property
    def key_lens_tensor(self) -> torch.Tensor:
        """int32 [B]: key_lens on the device."""
        return packing.lengths(self.key_lens, self.device)

    @cached_property
    def cu_query_lens(self) -> torch.Tensor:
        """int32 [B + 1]: where the sequences' new tokens begin among the T."""
        return packing.offsets(self.query_lens, self.device)

    @cached_property
    def earlier_lens_tensor(self) -> torch.Tensor:
        """int32 [B]: tokens of each sequence before the new ones."""
        earlier = [total - new for new, total in zip(self.query_lens, self.key_lens)]
        return packing.lengths(earlier, self.device)

    @cached_property
    def state_slots_tensor(self) -> torch.Tensor:
        """int32 [B]: state_slots on the device."""
        if self.state_slots is None:
            raise ValueError("state_slots: must be one a sequence for this model's cache, got None")
        return packing.to_device(self.state_slots, torch.int32, self.device)

    @cached_property
    def last_tokens(self) -> torch.Tensor:
        """int64 [B]: the row of each sequence's last token among the T."""
        return packing.to_device([end - 1 for end in accumulate(self.query_lens)], torch.int64, self.device)


def _table(pages: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """int32 [B, most pages]. ValueError for numbers that are no int32, of which torch says so while it copies them."""
    width = max(map(len, pages), default=0)
    try:
        table = packing.to_device(packing.page_rows(pages, width), torch.int32, device)
    except RuntimeError:
        most = max((max(own, default=0) for own in pages), default=0)
        if most > INT_MAX:
            raise ValueError(f"pages: must be numbers of pages, at most {INT_MAX}, got {shown(most)}") from None
        raise
    return table.reshape(len(pages), width)
