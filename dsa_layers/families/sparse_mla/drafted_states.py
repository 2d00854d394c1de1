"""What a step of a drafter hands on where further steps attend to the keys that the first one selected."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch

from dsa_layers.batch import packing
from dsa_layers.batch.selected import Selected
from dsa_layers.batch.token_batch import TokenBatch
from dsa_layers.cache.kv_cache import LayerCache
from dsa_layers.layers.attention import DSAAttention
from dsa_layers.layers.decoder import DecoderBlock

Rows = slice | torch.Tensor
Slots = Callable[[Rows], torch.Tensor]


@dataclass(frozen=True)
class DraftedStates:
    """values [T, hidden_size]: states that a step gave. slots: of any rows, int32 [N, top_k]: where in the drafter's
    cache the keys are that the first step attended to there, then -1; None where that had no cache.

    states[rows] are those of these rows, as of a tensor. Where keys are is only looked up for rows that are asked for:
    of a prompt these are few.
    """

    values: torch.Tensor
    slots: Slots | None

    def __getitem__(self, rows: Rows) -> "DraftedStates":
        return DraftedStates(self.values[rows], self.slots and self.slots(rows).__getitem__)


def slots_of(selected: Selected | None, batch: TokenBatch, cache: LayerCache | None, top_k: int) -> Slots | None:
    """Where the keys are that a pass has attended to. top_k: of its indexer."""
    if cache is None:
        return None
    indices = selected.topk_indices
    if indices is not None:
        (indices,) = selected.rows.gather(indices)
    if indices is not None and selected.counted_in == "slots":
        return indices.__getitem__

    def found(rows: Rows) -> torch.Tensor:
        if indices is None:  # all keys that a token sees, which are no more than it would select
            keys = torch.arange(top_k, dtype=torch.int32, device=batch.device)
            keys = torch.where(keys < batch.visible_keys[rows, None], keys, -1)
        elif selected.counted_in == "positions":
            keys = indices[rows]
        else:
            keys = packing.positions_of_rows(indices[rows], batch.key_starts[rows])
        return packing.selected_slots(batch.block_table, batch.page_size, batch.sequences[rows], keys)

    return found


def without_indexer(block: DecoderBlock) -> DecoderBlock:
    """The same layer, of the same parameters, that attends to the keys it is given."""
    other = copy.copy(block)
    other._modules = block._modules | {"self_attn": _attention_without_indexer(block.self_attn)}
    return other


def _attention_without_indexer(attention: DSAAttention) -> DSAAttention:
    other = copy.copy(attention)
    other._modules = attention._modules | {"indexer": None}
    if getattr(attention, "part", None) is not None:
        vars(other)["part"] = _attention_without_indexer(attention.part)
    return other
