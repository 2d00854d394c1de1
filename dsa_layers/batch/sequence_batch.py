"""Batches of packed sequences for prefill. The host knows the lengths of the sequences."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import le

import torch

from dsa.runtime.checks import INT_MAX, integer, shown, torch_device
from dsa_layers.batch import packing
from dsa_layers.batch.selectable_keys import cached_property
from dsa_layers.batch.token_batch import TokenBatch, check_of_sequences


@dataclass(frozen=True)
class SequenceBatch(TokenBatch):
    """T new tokens of B sequences, packed without padding.

    query_lens   new tokens of each sequence, at least 1; T is the sum of query_lens
    key_lens     tokens of each sequence after this pass: cached tokens, followed by new tokens
    device       device of the batch's tensors
    block_table  int32 [B, max_pages]: physical pages of each sequence, -1 after its last page; None without a cache
    page_size    tokens per page; 0 without a cache
    state_slots  for each sequence, its row in the tensors that have one row per sequence; may be None if the cache
                 stores all data in pages

    The constructor raises TypeError or ValueError, with the argument's name, for a wrong type, shape or device, for
    invalid numbers, and if block_table has too few columns for key_lens. It does not check the contents of block_table;
    `paged` builds block_table from checked page numbers.
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
    def without_cache(cls, query_lens: Sequence[int], device: torch.device | str = "cpu") -> "SequenceBatch":
        """Return a batch of complete sequences with the lengths `query_lens`: all tokens are new. The list may be
        empty."""
        return SequenceBatch(query_lens, query_lens, device)

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
        """Return a batch of sequences with a paged cache. pages: for each sequence, a list of its physical page
        numbers. Raise TypeError or ValueError for invalid pages, too few pages, and arguments that the constructor
        rejects."""
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
        return packing.repeated(list(range(len(self.query_lens))), self.query_lens, self.device)

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
        return packing.to_device(self.checked_state_slots(), torch.int32, self.device)

    @cached_property
    def last_tokens(self) -> torch.Tensor:
        return packing.to_device([end - 1 for end in accumulate(self.query_lens)], torch.int64, self.device)

    @property
    def _earlier_lens(self) -> list[int]:
        return [total - new for new, total in zip(self.query_lens, self.key_lens)]


@dataclass(frozen=True)
class Chunk:
    """The next `new` tokens of a sequence. The cache already has the `cached` tokens before them.

    pages       all pages of the sequence; they have room for the new tokens
    state_slot  row of the sequence in the tensors that have one row per sequence
    """

    new: int
    cached: int
    pages: Sequence[int]
    state_slot: int


def prefill_batch(chunks: Sequence[Chunk], page_size: int, device: torch.device | str) -> SequenceBatch:
    """Return the batch of these chunks, one chunk per sequence. Raise the errors of `SequenceBatch.paged`."""
    return SequenceBatch.paged(
        [chunk.new for chunk in chunks],
        [chunk.cached + chunk.new for chunk in chunks],
        [chunk.pages for chunk in chunks],
        page_size,
        device,
        [chunk.state_slot for chunk in chunks],
    )


def _integers(name: str, values: Sequence[int]) -> tuple[int, ...]:
    """Return `values` as a tuple. Raise TypeError if it is not a list of integers."""
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise TypeError(f"{name}: must be a list of integers, got {shown(values)}")
    if set(map(type, values)) <= {int}:  # fast path: a long context has thousands of pages
        return tuple(values)
    return tuple(integer(f"{name}[{i}]", value) for i, value in enumerate(values))


def _check_key_lens(query_lens: Sequence[int], key_lens: Sequence[int], room: Sequence[int] | None) -> None:
    """Raise ValueError if a sequence's key length is below its query length or above its `room`. room: for each
    sequence, the number of tokens that its pages can hold; None without pages."""
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
