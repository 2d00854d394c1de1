"""The two ways to split attention in long passes: a rank computes all heads for its rows, or its heads for all rows."""

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch

from dsa_layers.engine import split

# {way: value of split.TILE_OF_HEADS while the model is loaded}. With fewer heads per rank than this value, attention is
# split by queries. Tiny models have 1 to 63 heads per rank; the real value is 64.
WAYS = {"queries": split.TILE_OF_HEADS, "heads": 1}
# {precision: options of load_model}
OPTIONS = {
    "fp32": {"dtype": torch.float32, "dequantize": True, "progress": False},
    "fp8": {"dtype": torch.bfloat16, "progress": False},
}


@contextlib.contextmanager
def split_by(way: str) -> Iterator[None]:
    """Context manager: models that this process loads inside it split attention by `way`, a key of WAYS."""
    with mock.patch.object(split, "TILE_OF_HEADS", WAYS[way]):
        yield
