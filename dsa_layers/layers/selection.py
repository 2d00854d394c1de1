"""What an indexer selected in a pass, for its own layer and for the layers after it that have no indexer."""

from dataclasses import dataclass
from typing import Literal

import torch

from dsa_layers.batch import packing
from dsa_layers.batch.rows import ALL_ROWS, Rows, moved
from dsa_layers.batch.token_batch import TokenBatch

CountedIn = Literal["positions", "rows", "slots"]


@dataclass
class Selection:
    """Hands what a layer's indexer selected in this pass to the layers after it that have no indexer.

    Layers of one pass may read keys from different places: a frozen layer from its cache, a layer with gradients from
    this pass, a layer on another device from a cache there. `indices` therefore converts what was selected.

    topk_indices  int32 [T, top_k]: the selected keys, then -1; None if that layer attended to all keys
    bits          the same as `dsa.selection_bits`, where attention takes the multi-head form
    rows          whose rows topk_indices are: all T, or a process's own
    counted_in    whether topk_indices are positions in the sequence, rows among all packed keys, or slots in the cache
    batch         the batch of the selecting layer, whose slots or rows these are
    """

    topk_indices: torch.Tensor | None = None
    bits: torch.Tensor | None = None
    rows: Rows = ALL_ROWS
    counted_in: CountedIn = "rows"
    batch: TokenBatch | None = None

    def indices(self, counted_in: CountedIn, batch: TokenBatch, rows: Rows) -> torch.Tensor | None:
        """topk_indices for `rows` of a layer with this batch of the same tokens, on the batch's device."""
        found = self.topk_indices
        if found is None:
            return None
        if counted_in == self.counted_in and batch is self.batch:
            return moved(found, self.rows, rows)
        found = moved(self._positions(), self.rows, rows).to(batch.device)
        if counted_in == "slots":
            sequences = rows.own_kept(batch.sequences)
            return packing.selected_slots(batch.block_table, batch.page_size, sequences, found)
        if counted_in == "rows":
            return packing.packed_rows(found, rows.own_kept(batch.key_starts), len(batch.key_lens))
        return found

    def _positions(self) -> torch.Tensor:
        """topk_indices as positions in each token's sequence."""
        found, batch = self.topk_indices, self.batch
        if self.counted_in == "slots":
            sequences = self.rows.own_kept(batch.sequences)
            return packing.positions_of_slots(batch.block_table, batch.page_size, sequences, found)
        if self.counted_in == "rows":
            return packing.positions_of_rows(found, self.rows.own_kept(batch.key_starts))
        return found
