"""The batch of a chunked prefill: a pass over the next tokens of prompts whose earlier tokens are in the cache."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dsa_layers.batch.sequence_batch import SequenceBatch


@dataclass(frozen=True)
class Chunk:
    """The next `new` tokens of a sequence that has `cached` tokens in the cache already. pages: all of the sequence's,
    with room for the new tokens; state_slot: its row of what the cache keeps by sequence."""

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
