"""The keys that an indexer selected in a pass, for later layers without an indexer."""

from dataclasses import dataclass
from typing import Literal

import torch

from dsa_layers.batch import packing
from dsa_layers.batch.placement import WHOLE, Placement, redistribute
from dsa_layers.batch.token_batch import TokenBatch

CountedIn = Literal["positions", "rows", "slots"]


@dataclass(frozen=True)
class Selected:
    """The keys that a layer attended to in this pass. `indices` converts topk_indices to the form that a later layer
    needs.

    topk_indices  int32 [T, top_k]: the selected keys, padded with -1; None if the layer attended to all keys
    batch         batch of the layer that selected the keys; None if the pass has no tokens
    counted_in    the meaning of the values of topk_indices: positions in the sequence, rows among all packed keys of
                  `batch`, or slots in the cache of `batch`
    placement     topk_indices and bits have the local rows of this placement
    bits          the selected keys in the format of `dsa.selection_bits` if the layer attended to selected keys in the
                  multi-head form (engine/attention_form.py), else None
    """

    topk_indices: torch.Tensor | None
    batch: TokenBatch | None
    counted_in: CountedIn = "rows"
    placement: Placement = WHOLE
    bits: torch.Tensor | None = None

    def indices(self, counted_in: CountedIn, batch: TokenBatch, placement: Placement = WHOLE) -> torch.Tensor | None:
        """Return topk_indices converted to `counted_in`, on the device of `batch`, with the local rows of `placement`.
        Return None if the layer attended to all keys. batch: the later layer's batch of the same tokens."""
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
        """Return topk_indices as positions in each token's sequence."""
        found, batch = self.topk_indices, self.batch
        if self.counted_in == "slots":
            sequences = self.placement.local_cached(batch.sequences)
            return packing.positions_of_slots(batch.block_table, batch.page_size, sequences, found)
        if self.counted_in == "rows":
            return packing.positions_of_rows(found, self.placement.local_cached(batch.key_starts))
        return found
