"""Batches for decoding: a few new tokens per sequence, and sequence lengths in a tensor on the device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from dsa.runtime.checks import INT32, INT_MAX, check_tensor, integer
from dsa_layers.batch import packing
from dsa_layers.batch.selectable_keys import cached_property
from dsa_layers.batch.token_batch import TokenBatch, check_of_sequences


@dataclass(frozen=True)
class DecodeBatch(TokenBatch):
    """The last `next_n` tokens of each of B sequences. A cache has all earlier tokens. The first of the `next_n` tokens
    is the last token of the sequence's text; the others are drafts, guesses of the next tokens.

    block_table      int32 [B, max_pages]: physical pages of each sequence, -1 after its last page
    page_size        tokens per page
    key_lens_tensor  int32 [B]: tokens of each sequence after this pass, including the new tokens, at least next_n. A
                     padding row, which has no sequence, has length 0, and -1 in all columns of block_table. Padding
                     rows are not allowed if the cache stores states per sequence
    max_key_len      upper bound of the lengths in key_lens_tensor
    state_slots      int32 [B]: for each sequence, its row in the tensors that have one row per sequence; may be None
                     if the cache stores all data in pages
    next_n           new tokens per sequence. A cache with windows per sequence has room for at most
                     dsa_layers.cache.drafts.DRAFTS + 1 new tokens; for more, the layers raise ValueError

    If the model's `captures_decode` is true, a CUDA graph can capture a pass and the construction of its batch. A
    replay reads the values that the caller has written to the same tensors, with lengths up to max_key_len.
    For an argument of a wrong type, shape or device, or a number out of range, the constructor raises TypeError or
    ValueError with the argument's name. It does not check the contents of tensors.
    """

    block_table: torch.Tensor
    page_size: int
    key_lens_tensor: torch.Tensor
    max_key_len: int
    state_slots: torch.Tensor | None = None
    next_n: int = 1

    is_decode = True
    least_visible = 1

    def __post_init__(self) -> None:
        lens = self.key_lens_tensor
        check_tensor("key_lens_tensor", lens, INT32, ("B",))
        count, source = len(lens), "key_lens_tensor"
        check_of_sequences("block_table", self.block_table, count, lens.device, source, "max_pages")
        if self.state_slots is not None:
            check_of_sequences("state_slots", self.state_slots, count, lens.device, source)
        integer("page_size", self.page_size, at_least=1)
        next_n = integer("next_n", self.next_n, at_least=1)
        integer("max_key_len", self.max_key_len, at_least=next_n, at_most=INT_MAX)

    @property
    def query_lens(self) -> tuple[int, ...]:
        return (self.next_n,) * len(self.key_lens_tensor)

    @property
    def key_lens(self) -> tuple[int, ...]:
        return (self.max_key_len,) * len(self.key_lens_tensor)

    @property
    def device(self) -> torch.device:
        return self.key_lens_tensor.device

    @property
    def state_slots_tensor(self) -> torch.Tensor:
        return self.checked_state_slots()

    @cached_property
    def visible_keys(self) -> torch.Tensor:
        if self.next_n == 1:
            return self.key_lens_tensor
        behind = torch.arange(1 - self.next_n, 1, dtype=torch.int32, device=self.device)
        return (self.key_lens_tensor[:, None] + behind).flatten()

    @cached_property
    def positions(self) -> torch.Tensor:
        positions = torch.empty(len(self.visible_keys), dtype=torch.int64, device=self.device)
        return torch.sub(self.visible_keys, 1, out=positions)  # one kernel; .long() - 1 takes two

    @cached_property
    def earlier_lens_tensor(self) -> torch.Tensor:
        return self.key_lens_tensor - self.next_n

    # The next three properties depend only on B and next_n.

    @cached_property
    def sequences(self) -> torch.Tensor:
        tokens = torch.arange(self._tokens, dtype=torch.int32, device=self.device)
        return tokens if self.next_n == 1 else tokens // self.next_n

    @cached_property
    def cu_query_lens(self) -> torch.Tensor:
        return torch.arange(0, self._tokens + 1, self.next_n, dtype=torch.int32, device=self.device)

    @cached_property
    def last_tokens(self) -> torch.Tensor:
        return self.cu_query_lens[1:].long() - 1

    def of_size(self) -> dict[str, Any]:
        """Return {name: value} of the three properties above and of `groups`: fields for `unchecked`, so that another
        batch with equal B and next_n does not compute them."""
        return {name: getattr(self, name) for name in ("sequences", "cu_query_lens", "last_tokens", "groups")}

    @property
    def _tokens(self) -> int:
        return len(self.key_lens_tensor) * self.next_n


class Running(Protocol):
    """The interface of a running sequence. tokens: the sequence's text; the cache has all of these tokens except the
    last one. drafts: guesses of the next tokens, equally many in all sequences of a pass. pages, state_slot: the
    sequence's page numbers and state slot in the cache."""

    tokens: Sequence[int]
    drafts: Sequence[int]
    pages: Sequence[int]
    state_slot: int


class DecodeInputs:
    """Input tensors of decoding passes. The tensors' addresses do not change, so a replay of a captured CUDA graph
    reads the values that were written last.

    count   sequences per pass
    pages   columns of the block table
    next_n  tokens per sequence
    tokens  int64 [count * next_n]: the last token of each sequence, followed by its drafts

    `DecodeBatch` describes page_size and the other tensors: key_lens (key_lens_tensor), block_table and state_slots.
    """

    def __init__(self, count: int, pages: int, page_size: int, device: torch.device, next_n: int = 1) -> None:
        self.count, self.pages, self.page_size, self.next_n = count, pages, page_size, next_n
        self.tokens = torch.zeros(count * next_n, dtype=torch.int64, device=device)
        self.key_lens = torch.ones(count, dtype=torch.int32, device=device)
        self.block_table = torch.full((count, pages), -1, dtype=torch.int32, device=device)
        self.state_slots = torch.zeros(count, dtype=torch.int32, device=device)
        self._held: list[Running] = []
        self._of_size = self._batch(self.key_lens, next_n).of_size()

    def fill(self, sequences: Sequence[Running], padding: Running) -> None:
        rows = self.hold(sequences, padding)
        packing.write(self.tokens, [token for row in rows for token in (row.tokens[-1], *row.drafts)])
        packing.write(self.key_lens, [len(row.tokens) + len(row.drafts) for row in rows])

    def hold(self, sequences: Sequence[Running], padding: Running) -> list[Running]:
        """Return the sequence of each row of the pass: `sequences`, then in the remaining rows `padding`. Write
        block_table and state_slots if a row has another sequence object than in the last call. Otherwise no write is
        needed: the pages of a sequence must not change while it decodes."""
        rows = [*sequences, *[padding] * (self.count - len(sequences))]
        if len(self._held) != len(rows) or any(a is not b for a, b in zip(self._held, rows)):
            packing.write(self.block_table, packing.page_rows([row.pages for row in rows], self.pages))
            packing.write(self.state_slots, [row.state_slot for row in rows])
            self._held = rows
        return rows

    def batch(self, key_lens: torch.Tensor | None = None) -> DecodeBatch:
        """Return a new batch of these tensors. key_lens: lengths to use instead of the attribute `key_lens`."""
        return self._batch(self.key_lens if key_lens is None else key_lens, self.next_n, **self._of_size)

    def one_each(self, key_lens: torch.Tensor) -> DecodeBatch:
        """Return a new batch with one new token per sequence and the lengths `key_lens`."""
        return self._batch(key_lens, 1)

    def _batch(self, key_lens: torch.Tensor, next_n: int, **of_size: Any) -> DecodeBatch:
        return DecodeBatch.unchecked(
            block_table=self.block_table,
            page_size=self.page_size,
            key_lens_tensor=key_lens,
            max_key_len=self.pages * self.page_size,
            state_slots=self.state_slots,
            next_n=next_n,
            **of_size,
        )
