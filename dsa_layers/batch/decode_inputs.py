"""The input tensors of a decoding pass, filled from the sequences that are running."""

from collections.abc import Sequence
from typing import Protocol

import torch

from dsa_layers.batch import packing
from dsa_layers.batch.decode_batch import DecodeBatch
from dsa_layers.batch.decode_layout import DecodeLayout


class Running(Protocol):
    """A sequence all of whose tokens but the last are in the cache. drafts: guesses of those behind it, as many as the
    passes of all sequences have beside the last tokens."""

    tokens: Sequence[int]
    drafts: Sequence[int]
    pages: Sequence[int]
    state_slot: int


class DecodeInputs:
    """The tensors that a decoding pass reads. Their addresses stay the same, so that a captured CUDA graph reads what
    `fill` has written since.

    tokens int64 [count * next_n]: of each sequence its last token and its drafts. The other tensors are those of the
    DecodeBatch that `batch` makes. count: sequences of the batch; pages: columns of its block table.
    """

    def __init__(self, count: int, pages: int, page_size: int, device: torch.device, next_n: int = 1) -> None:
        self.count, self.pages, self.page_size, self.next_n = count, pages, page_size, next_n
        self.tokens = torch.zeros(count * next_n, dtype=torch.int64, device=device)
        self.key_lens = torch.ones(count, dtype=torch.int32, device=device)
        self.block_table = torch.full((count, pages), -1, dtype=torch.int32, device=device)
        self.state_slots = torch.zeros(count, dtype=torch.int32, device=device)
        self._layout = DecodeLayout(count, next_n, device)
        self._held: list[Running] = []

    def fill(self, sequences: Sequence[Running], padding: Running) -> None:
        """Writes a row for each sequence, and `padding` into the rows that remain."""
        rows = [*sequences, *[padding] * (self.count - len(sequences))]
        packing.write(self.tokens, [token for row in rows for token in (row.tokens[-1], *row.drafts)])
        packing.write(self.key_lens, [len(row.tokens) + len(row.drafts) for row in rows])
        if len(self._held) != len(rows) or any(a is not b for a, b in zip(self._held, rows)):
            # A sequence keeps its pages for as long as it runs.
            packing.write(self.block_table, packing.page_rows([row.pages for row in rows], self.pages))
            packing.write(self.state_slots, [row.state_slot for row in rows])
            self._held = rows

    def batch(self) -> DecodeBatch:
        return DecodeBatch.unchecked(
            block_table=self.block_table,
            page_size=self.page_size,
            key_lens_tensor=self.key_lens,
            max_key_len=self.pages * self.page_size,
            state_slots=self.state_slots,
            next_n=self.next_n,
            layout=self._layout,
        )
