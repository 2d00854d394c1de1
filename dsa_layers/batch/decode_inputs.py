"""The input tensors of a decoding pass, filled from the sequences that run."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from dsa_layers.batch import packing
from dsa_layers.batch.decode_batch import DecodeBatch


class Running(Protocol):
    """A sequence whose tokens are all in the cache, except for the last one. drafts: guesses of the next tokens. All
    sequences of a pass have the same number of drafts."""

    tokens: Sequence[int]
    drafts: Sequence[int]
    pages: Sequence[int]
    state_slot: int


class DecodeInputs:
    """Tensors whose addresses stay the same, so that a captured CUDA graph reads what was written to them last.

    count   sequences of the pass
    pages   columns of its block table
    next_n  tokens of each sequence
    tokens  int64 [count * next_n]: each sequence's last token and its drafts

    The other tensors are those of the `DecodeBatch` that `batch` makes.
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
        """Return the sequence of each row; `padding` fills the remaining rows. Write the places in the cache, if a row
        has another sequence than before: a sequence keeps its pages while it runs."""
        rows = [*sequences, *[padding] * (self.count - len(sequences))]
        if len(self._held) != len(rows) or any(a is not b for a, b in zip(self._held, rows)):
            packing.write(self.block_table, packing.page_rows([row.pages for row in rows], self.pages))
            packing.write(self.state_slots, [row.state_slot for row in rows])
            self._held = rows
        return rows

    def batch(self, key_lens: torch.Tensor | None = None) -> DecodeBatch:
        """Return a new batch of these tensors. key_lens: other lengths than `fill` has written."""
        return self._batch(self.key_lens if key_lens is None else key_lens, self.next_n, **self._of_size)

    def one_each(self, key_lens: torch.Tensor) -> DecodeBatch:
        """Return a new batch of one token per sequence, with these lengths."""
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
