"""What every pass checks of its arguments, by types, shapes and dtypes alone: numbers that the host has at hand."""

import torch

from dsa.runtime.checks import FLOATS, check_tensor
from dsa_layers.batch.token_batch import TokenBatch
from dsa_layers.cache.compressed_kv_cache import EntryCache
from dsa_layers.layers.linear import BlockFP8Linear, Linear


def check_batch(batch: object) -> None:
    """TypeError for what is no batch."""
    if not isinstance(batch, TokenBatch):
        raise TypeError(f"batch: must be a SequenceBatch or a DecodeBatch, got {type(batch).__name__}")


def check_cache(cache: object, kind: type) -> None:
    """TypeError for what is not the cache of one layer."""
    if not isinstance(cache, kind):
        raise TypeError(f"cache: must be a {kind.__name__} or None, got {type(cache).__name__}")


def check_pages(batch: TokenBatch, page_size: int) -> None:
    """ValueError unless the batch is one of pages of so many tokens, which those of a cache have."""
    if batch.block_table is None:
        raise ValueError("batch: must have pages where there is a cache, got block_table=None")
    if batch.page_size != page_size:
        raise ValueError(f"page_size: must be the cache's {page_size}, got {batch.page_size}")


def check_entries(name: str, entries: EntryCache | None, ratio: int, batch: TokenBatch) -> None:
    """The same of a layer's compressed entries, one for every `ratio` tokens of a page."""
    if entries is None:
        raise ValueError(f"cache: must have {name} where the layer compresses tokens, got None")
    check_pages(batch, entries.pages.shape[1] * ratio)


def check_rows(name: str, x: torch.Tensor, reader: torch.nn.Module) -> None:
    """TypeError or ValueError unless x [T, I] is what `reader`, one of this package's linear layers, takes. Others, as
    adapters are, say themselves what they take."""
    kind = type(reader)
    if kind is not Linear and kind is not BlockFP8Linear:
        return
    weight = reader.weight  # which takes Python longer than the rest
    dtypes = (weight.dtype,) if kind is Linear else FLOATS
    if not isinstance(x, torch.Tensor) or x.dtype in dtypes or not _casts(x):
        check_tensor(name, x, dtypes, ("T", weight.shape[1]))


def _casts(x: torch.Tensor) -> bool:
    """Whether autocast makes x, of another dtype, fit the weights."""
    return x.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(x.device.type)
