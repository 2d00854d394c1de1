"""The inputs of a fused layer in a pass, apart from x: tokens, rope angles, cache, and the placement of rows."""

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from dsa_layers.batch.placement import WHOLE, Placement
from dsa_layers.batch.token_batch import TokenBatch

Cache = TypeVar("Cache")
Angles = tuple[torch.Tensor, torch.Tensor]  # cos and sin, fp32 [T, rope_dim / 2]


@dataclass
class LayerPass(Generic[Cache]):
    """One layer's part of a pass over T new tokens.

    batch    the tokens of all ranks
    angles   cos and sin of all T tokens
    cache    the layer's cache, or None
    placement  of the rows of x
    queries  placement of the rows for which this call of the layer computes the result: `placement`, or all
    in_pages whether attention reads keys where they are in the cache
    """

    batch: TokenBatch
    angles: Angles
    cache: Cache | None = None
    placement: Placement = WHOLE
    queries: Placement = WHOLE
    in_pages: bool = False

    @property
    def decode(self) -> bool:
        """Whether every sequence has one new token, or a few, and all earlier ones are in the cache."""
        return self.cache is not None and self.batch.is_decode

    @property
    def query_angles(self) -> Angles:
        cos, sin = self.angles
        return self.queries.local_cached(cos), self.queries.local_cached(sin)


@dataclass
class EntryPass(LayerPass[Cache]):
    """A pass of a layer with compressed entries. entry_angles: of the entries that the tokens may end; None without
    entries."""

    entry_angles: Angles | None = None


class KeyCounter(Protocol):
    """Interface to which a layer reports once per pass, while keys are counted, how many keys each token reads."""

    def add(self, read: torch.Tensor, dense: torch.Tensor, context: torch.Tensor) -> None:
        """Integers [T] of the pass's new tokens. read: the keys that a token's attention reads; dense: those that dense
        attention over the same cache would read; context: the tokens up to the token, itself included. A key is a row
        of the cache, which stands for a token or, compressed, for several."""
