"""How ranks split attention in long passes."""

import contextlib
from collections.abc import Iterator
from unittest import mock

from dsa_layers.layers import shares

# Heads of a rank from which on it has a part of the heads in long passes, too. Tiny models have few.
WAYS = {"queries": shares.TILE_OF_HEADS, "heads": 1}


@contextlib.contextmanager
def split_by(way: str) -> Iterator[None]:
    """In this process models are loaded, and run, as those of a share of many heads, or of few."""
    with mock.patch.object(shares, "TILE_OF_HEADS", WAYS[way]):
        yield
