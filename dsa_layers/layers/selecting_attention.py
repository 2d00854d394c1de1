"""What `dsa compare` asks of attention layers whose tokens select the keys that they read.

Layers are found by these attributes, whatever their class: a family with an attention of its own needs nothing else.
"""

from typing import Protocol

import torch

from dsa_layers.batch.selectable_keys import SelectableKeys
from dsa_layers.batch.token_batch import TokenBatch
from dsa_layers.layers.indexer import Indexer


def selecting_method(indexer: Indexer) -> str:
    """The name of the method that selects keys in a layer's passes: `pick`, which attention for inference calls, or
    `select`."""
    return "pick" if hasattr(indexer, "pick") else "select"


class KeyCounter(Protocol):
    """What a layer reports to, in every pass, while keys are counted."""

    def add(self, read: torch.Tensor, dense: torch.Tensor, context: torch.Tensor) -> None:
        """Integers [T] of the pass's new tokens. read: the keys that a token's attention reads; dense: those that dense
        attention over the same cache would read; context: the tokens up to the token, itself included. A key is a row
        of the cache, which stands for a token or, compressed, for several."""


class SelectingAttention(Protocol):
    """An attention layer, as `KeysRead`, `all_keys` and `latest_keys` of `dsa_layers.evaluation` need it.

    key_counter  None but while keys are counted; the layer then calls its `add` once a pass
    indexer      has `top_k` and `select`, as `Indexer` says. None: the layer's tokens read all keys, or those that
                 another layer selected. Tokens that see no more than `top_k` keys read all of them
    """

    indexer: Indexer | None
    key_counter: KeyCounter | None

    def selectable(self, batch: TokenBatch) -> SelectableKeys:
        """The keys among which the indexer selects in a pass over `batch`: tokens, or compressed entries."""
