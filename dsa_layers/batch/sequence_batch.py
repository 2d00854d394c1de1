"""New tokens of several sequences, packed, whose lengths are known on the host."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import le

import torch

from dsa.runtime.checks import INT_MAX, torch_device
from dsa_layers.arguments import integer, shown
from dsa_layers.batch import packing
from dsa_layers.batch.selectable_keys import cached_property
from dsa_layers.batch.token_batch import TokenBatch, check_of_sequences


@dataclass(frozen=True)
class SequenceBatch(TokenBatch):
    """T new tokens of B sequences, packed one sequence after the other without padding.

    query_lens   new tokens of each sequence, at least 1 each; T is their sum
    key_lens     tokens of each sequence after this pass, cached ones and new ones; the new ones are the last
    device       where the tensors below are
    block_table  int32 [B, max_pages]: physical pages of each sequence, -1 after its last page; None without a cache
    page_size    tokens per page; 0 without a cache
    state_slots  each sequence's row of the tensors that a cache stores per sequence and not per page; None if there are
                 none

    Lengths are numbers on the host, so that no layer has to copy one from the device.
    Raises TypeError or ValueError that names the argument, also for lengths that have no room in the table. The
    contents of the table are not checked: `paged` makes it from numbers that it has checked.
    """

    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    device: torch.device
    block_table: torch.Tensor | None = None
    page_size: int = 0
    state_slots: tuple[int, ...] | None = None

    next_n = 1

    def __post_init__(self) -> None:
        query_lens, key_lens = _integers("query_lens", self.query_lens), _integers("key_lens", self.key_lens)
        if min(query_lens, default=1) < 1:
            got = shown(list(query_lens))
            raise ValueError(f"query_lens: every sequence needs at least one new token, got {got}")
        count, room = len(query_lens), None
        if count != len(key_lens):
            raise ValueError(f"query_lens, key_lens: must have one entry a sequence, got {count} and {len(key_lens)}")
        device = torch_device("device", self.device)
        integer("page_size", self.page_size, at_least=0 if self.block_table is None else 1)
        if self.block_table is not None:
            check_of_sequences("block_table", self.block_table, count, device, "query_lens", "max_pages")
            room = [self.block_table.shape[1] * self.page_size] * count
        _check_key_lens(query_lens, key_lens, room)
        slots = None if self.state_slots is None else _integers("state_slots", self.state_slots)
        if slots is not None and not (
            count == len(slots) == len(set(slots)) and all(0 <= slot <= INT_MAX for slot in slots)
        ):
            raise ValueError(
                f"state_slots: must be {count} different numbers, one a sequence, got {shown(list(slots))}"
            )
        vars(self).update(query_lens=query_lens, key_lens=key_lens, device=device, state_slots=slots)

    @classmethod
    def without_cache(cls, lens: Sequence[int], device: torch.device | str = "cpu") -> "SequenceBatch":
        """Return the batch of whole sequences of these lengths, whose tokens are all new. [] is the batch of a rank
        without work."""
        lens = _integers("lens", lens)
        if min(lens, default=1) < 1:
            raise ValueError(f"lens: every sequence needs at least one new token, got {shown(list(lens))}")
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
        """Return the batch of new tokens of sequences whose keys are in `pages`: physical page numbers, one list per
        sequence."""
        if not isinstance(pages, Sequence):
            raise TypeError(f"pages: must be a list of pages for each sequence, got {shown(pages)}")
        pages = [_integers(f"pages[{i}]", own) for i, own in enumerate(pages)]
        if any(min(own, default=0) < 0 or max(own, default=0) > INT_MAX for own in pages):
            raise ValueError(f"pages: must be numbers of pages, from 0 to {INT_MAX}, got {shown(pages)}")
        table = packing.page_rows(pages, max(map(len, pages), default=0))
        table = packing.to_device(table, torch.int32, torch_device("device", device)).reshape(
            len(pages), -1 if pages else 0
        )
        batch = cls(query_lens, key_lens, device, table, page_size, state_slots)
        _check_key_lens(batch.query_lens, batch.key_lens, [len(own) * page_size for own in pages])
        return batch

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has one new token."""
        return all(n == 1 for n in self.query_lens)

    @property
    def max_key_len(self) -> int:
        return max(self.key_lens, default=0)

    @property
    def least_visible(self) -> int:
        return min(self._earlier_lens, default=-1) + 1

    @cached_property
    def positions(self) -> torch.Tensor:
        return packing.ranges(self._earlier_lens, self.key_lens, self.device)

    @cached_property
    def sequences(self) -> torch.Tensor:
        return packing.owners(self.query_lens, self.device)

    @cached_property
    def key_lens_tensor(self) -> torch.Tensor:
        return packing.to_device(self.key_lens, torch.int32, self.device)

    @cached_property
    def cu_query_lens(self) -> torch.Tensor:
        return packing.offsets(self.query_lens, self.device)

    @cached_property
    def earlier_lens_tensor(self) -> torch.Tensor:
        return packing.to_device(self._earlier_lens, torch.int32, self.device)

    @cached_property
    def state_slots_tensor(self) -> torch.Tensor:
        if self.state_slots is None:
            raise ValueError("state_slots: must be one a sequence for this model's cache, got None")
        return packing.to_device(self.state_slots, torch.int32, self.device)

    @cached_property
    def last_tokens(self) -> torch.Tensor:
        return packing.to_device([end - 1 for end in accumulate(self.query_lens)], torch.int64, self.device)

    @property
    def _earlier_lens(self) -> list[int]:
        return [total - new for new, total in zip(self.query_lens, self.key_lens)]


@dataclass(frozen=True)
class Chunk:
    """The next `new` tokens of a sequence of which `cached` tokens are already in the cache.

    pages       all pages of the sequence, with room for the new tokens
    state_slot  the sequence's row in the tensors that the cache stores per sequence
    """

    new: int
    cached: int
    pages: Sequence[int]
    state_slot: int


def prefill_batch(chunks: Sequence[Chunk], page_size: int, device: torch.device | str) -> SequenceBatch:
    """One chunk of each sequence. The pass' tokens are those of the chunks, packed in their order.

    Raises TypeError or ValueError as `SequenceBatch.paged` does, whose key_lens are the tokens with the new ones.
    """
    return SequenceBatch.paged(
        [chunk.new for chunk in chunks],
        [chunk.cached + chunk.new for chunk in chunks],
        [chunk.pages for chunk in chunks],
        page_size,
        device,
        [chunk.state_slot for chunk in chunks],
    )


def _integers(name: str, values: Sequence[int]) -> tuple[int, ...]:
    """Return `values` as a tuple. Raise TypeError if they are not a list of integers."""
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise TypeError(f"{name}: must be a list of integers, got {shown(values)}")
    if set(map(type, values)) <= {int}:  # as a rule; a long context has thousands of pages
        return tuple(values)
    return tuple(integer(f"{name}[{i}]", value) for i, value in enumerate(values))


def _check_key_lens(query_lens: Sequence[int], key_lens: Sequence[int], room: Sequence[int] | None) -> None:
    """Raise ValueError if a sequence has fewer tokens than new ones, or more than its pages have room for."""
    if all(map(le, query_lens, key_lens)) and (room is None or all(map(le, key_lens, room))):
        return
    for i, (new, total) in enumerate(zip(query_lens, key_lens)):
        if room is None and total < new:
            raise ValueError(f"key_lens[{i}]: must be at least query_lens[{i}]={new}, got {shown(total)}")
        if room is not None and not new <= total <= room[i]:
            raise ValueError(
                f"key_lens[{i}]: must be between query_lens[{i}]={new} and the {room[i]} tokens of its pages, got "
                f"{shown(total)}"
            )
