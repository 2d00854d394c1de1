"""The input tensors of passes over running sequences, filled from the sequences that are running."""

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


class PagedInputs:
    """The tensors that a pass over running sequences reads. Their addresses stay the same, so that a captured CUDA
    graph reads what has been written since.

    count: sequences of the pass; pages: columns of its block table.
    """

    def __init__(self, count: int, pages: int, page_size: int, device: torch.device) -> None:
        self.count, self.pages, self.page_size = count, pages, page_size
        self.key_lens = torch.ones(count, dtype=torch.int32, device=device)
        self.block_table = torch.full((count, pages), -1, dtype=torch.int32, device=device)
        self.state_slots = torch.zeros(count, dtype=torch.int32, device=device)
        self._held: list[Running] = []

    def hold(self, sequences: Sequence[Running], padding: Running) -> list[Running]:
        """A row for each sequence, and `padding` for those that remain; where they are in the cache is written. A
        sequence keeps its pages for as long as it runs, so that other ones alone are news."""
        rows = [*sequences, *[padding] * (self.count - len(sequences))]
        if len(self._held) != len(rows) or any(a is not b for a, b in zip(self._held, rows)):
            packing.write(self.block_table, packing.page_rows([row.pages for row in rows], self.pages))
            packing.write(self.state_slots, [row.state_slot for row in rows])
            self._held = rows
        return rows


class DecodeInputs(PagedInputs):
    """Those of a decoding pass.

    tokens int64 [count * next_n]: of each sequence its last token and its drafts. The other tensors are those of the
    DecodeBatch that `batch` makes.
    """

    def __init__(self, count: int, pages: int, page_size: int, device: torch.device, next_n: int = 1) -> None:
        super().__init__(count, pages, page_size, device)
        self.next_n = next_n
        self.tokens = torch.zeros(count * next_n, dtype=torch.int64, device=device)
        self._layout = DecodeLayout(count, next_n, device)

    def fill(self, sequences: Sequence[Running], padding: Running) -> None:
        rows = self.hold(sequences, padding)
        packing.write(self.tokens, [token for row in rows for token in (row.tokens[-1], *row.drafts)])
        packing.write(self.key_lens, [len(row.tokens) + len(row.drafts) for row in rows])

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
