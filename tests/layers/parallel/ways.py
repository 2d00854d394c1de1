"""The two ways to split attention in long passes: all heads of a rank's rows, or a rank's heads of all rows."""

import contextlib
from collections.abc import Iterator
from unittest import mock

from dsa_layers.engine import split

# TILE_OF_HEADS while the model is loaded. Tiny models have fewer than 64 heads per rank.
WAYS = {"queries": split.TILE_OF_HEADS, "heads": 1}


@contextlib.contextmanager
def split_by(way: str) -> Iterator[None]:
    """Load models in this process so that they split attention in this way."""
    with mock.patch.object(split, "TILE_OF_HEADS", WAYS[way]):
        yield
