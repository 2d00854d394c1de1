"""What an indexer selected in a pass, for the layers after its own that have no indexer."""

from dataclasses import dataclass
from typing import Literal

import torch

from dsa_layers.batch import packing
from dsa_layers.batch.placement import WHOLE, Placement, redistribute
from dsa_layers.batch.token_batch import TokenBatch

CountedIn = Literal["positions", "rows", "slots"]


@dataclass(frozen=True)
class Selected:
    """The keys that a layer attended to in this pass.

    A later layer may read its keys elsewhere: in its cache, among the keys of this pass, or on another device.
    `indices` converts topk_indices for the later layer.

    topk_indices  int32 [T, top_k]: the selected keys, then -1; None if the layer attended to all keys
    batch         the batch of the selecting layer, in which topk_indices are slots or rows; None without tokens
    counted_in    whether topk_indices are positions in the sequence, rows among all packed keys, or slots in the cache
    placement     the placement of topk_indices' rows: all T rows, or this rank's local rows
    bits          the selected keys as `dsa.selection_bits`, if attention takes the multi-head form; else None
    """

    topk_indices: torch.Tensor | None
    batch: TokenBatch | None
    counted_in: CountedIn = "rows"
    placement: Placement = WHOLE
    bits: torch.Tensor | None = None

    def indices(self, counted_in: CountedIn, batch: TokenBatch, placement: Placement = WHOLE) -> torch.Tensor | None:
        """topk_indices for the local rows of `placement`, for a layer with this batch of the same tokens, on its
        device."""
        found = self.topk_indices
        if found is None:
            return None
        if counted_in == self.counted_in and batch is self.batch:
            return redistribute(found, self.placement, placement)
        found = redistribute(self._positions(), self.placement, placement).to(batch.device)
        if counted_in == "slots":
            sequences = placement.local_cached(batch.sequences)
            return packing.selected_slots(batch.block_table, batch.page_size, sequences, found)
        if counted_in == "rows":
            return packing.packed_rows(found, placement.local_cached(batch.key_starts), len(batch.key_lens))
        return found

    def _positions(self) -> torch.Tensor:
        """topk_indices as positions in each token's sequence."""
        found, batch = self.topk_indices, self.batch
        if self.counted_in == "slots":
            sequences = self.placement.local_cached(batch.sequences)
            return packing.positions_of_slots(batch.block_table, batch.page_size, sequences, found)
        if self.counted_in == "rows":
            return packing.positions_of_rows(found, self.placement.local_cached(batch.key_starts))
        return found
