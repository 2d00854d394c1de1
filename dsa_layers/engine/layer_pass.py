"""Inputs of a fused layer in a pass, except x: tokens, rope angles, cache and placement of rows; and input checks."""

from dataclasses import dataclass
from typing import Any

import torch

from dsa_layers.batch.placement import WHOLE, Placement
from dsa_layers.batch.token_batch import TokenBatch, check_all_keys_are_new
from dsa_layers.layers.rope import Angles


@dataclass
class LayerPass:
    """The inputs of one layer in a pass over T new tokens.

    batch      all T tokens, including those whose rows of x are on other ranks
    angles     cos and sin for all T tokens
    cache      the layer's cache, or None
    placement  the placement of the rows of x
    queries    the placement of the query rows for which this rank computes attention: `placement`, or all rows
    in_pages   whether attention reads keys directly from the pages of the cache
    """

    batch: TokenBatch
    angles: Angles
    cache: Any = None
    placement: Placement = WHOLE
    queries: Placement = WHOLE
    in_pages: bool = False

    @property
    def decode(self) -> bool:
        """Whether this is a decoding pass with a cache."""
        return self.cache is not None and self.batch.is_decode

    @property
    def gathered(self) -> Placement:
        """The placement from which to gather the query rows; `WHOLE` if this rank already has these rows."""
        return self.placement if self.placement.sharded and not self.queries.sharded else WHOLE

    @property
    def query_positions(self) -> torch.Tensor:
        return self.queries.local_cached(self.batch.positions)

    @property
    def query_angles(self) -> Angles:
        cos, sin = self.angles
        return self.queries.local_cached(cos), self.queries.local_cached(sin)


@dataclass
class EntryPass(LayerPass):
    """A `LayerPass` of `PagedCompressedAttention` or its indexer.

    entry_angles: cos and sin at the positions `EntryView.positions`; None if the layer has no compressor.
    """

    entry_angles: Angles | None = None


def check_inference(x: torch.Tensor, batch: TokenBatch, cache: object, kind: type) -> None:
    """Raise ValueError if gradients are enabled and x requires them, or if `cache` is None and a sequence has earlier
    tokens. Raise TypeError if `cache` is neither None nor of the class `kind`."""
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "x: a layer for inference has no gradients; accepted: requires_grad=False, or a pass under "
            "torch.no_grad(), got requires_grad=True"
        )
    if cache is None:
        check_all_keys_are_new(batch)
    elif not isinstance(cache, kind):
        raise TypeError(f"cache: must be a {kind.__name__} or None, got {type(cache).__name__}")
