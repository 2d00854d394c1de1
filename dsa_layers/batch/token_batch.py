"""The base class of batches, and checks of batches."""

from typing import Any, Self

import torch

import dsa
from dsa.runtime.checks import INT32, check_tensor
from dsa_layers.batch import packing
from dsa_layers.batch.selectable_keys import SelectableKeys, cached_property
from dsa_layers.batch.views import EntryView, StateView, WindowView


class TokenBatch(SelectableKeys):
    """T new tokens of B sequences. The keys of the pass are the tokens of these sequences. Subclasses have the
    attributes of `SelectableKeys`, and these attributes:

    is_decode            whether this is a decoding pass: every sequence has `next_n` new tokens, one or a few
    positions            int64 [T]: each new token's position in its sequence
    earlier_lens_tensor  int32 [B]: the number of each sequence's tokens before its new tokens
    cu_query_lens        int32 [B + 1]: the first row of each sequence among the T new tokens, then T
    last_tokens          int64 [B]: the row of each sequence's last token among the T new tokens
    state_slots          the numbers of state_slots_tensor, or None
    state_slots_tensor   int32 [B]: for each sequence, its row in the tensors that have one row per sequence. Raises
                         ValueError if state_slots is None
    """

    @classmethod
    def unchecked(cls, **fields: Any) -> Self:
        """Return a batch without the constructor's checks, to save time. fields: all fields of the dataclass, and
        values of cached properties that the caller already has."""
        batch = object.__new__(cls)
        vars(batch).update(fields)
        return batch

    @cached_property
    def slots(self) -> torch.Tensor:
        """int64 [T]: the cache slot of each new token, page * page_size + offset; -1 without a page."""
        return dsa.slot_mapping(
            self.block_table, self.cu_query_lens, self.key_lens_tensor, sum(self.query_lens), self.page_size
        )

    @cached_property
    def visible_keys(self) -> torch.Tensor:
        return (self.positions + 1).to(torch.int32)

    @property
    def keyed(self) -> Self:
        """The batch of these tokens and of all keys that the tokens see: `self`, except in `ContextBatch`
        (dsa_layers/parallel/context.py), which has one rank's part of the tokens."""
        return self

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows [S, ...] of all S keys of `keyed`, in a pass without a cache. x [T, ...]: the rows of the
        tokens. The result is differentiable in x."""
        return x

    @cached_property
    def cu_key_lens(self) -> torch.Tensor:
        """int32 [B + 1]: the first row of each sequence among all packed keys, then the number of rows."""
        return packing.offsets(self.key_lens, self.device)

    @cached_property
    def key_slots(self) -> torch.Tensor:
        """int64 [sum(key_lens)]: the slots of all keys, sequence after sequence; -1 for keys without a page."""
        return dsa.slot_mapping(self.block_table, self.cu_key_lens, None, sum(self.key_lens), self.page_size)

    @cached_property
    def mla_schedule(self) -> dsa.FlashMLASchedMeta:
        """The schedule of `dsa.flash_mla_with_kvcache` for attention to all keys. The op's first call in the pass fills
        it."""
        return dsa.get_mla_metadata()[0]

    def checked_state_slots(self) -> Any:
        if self.state_slots is None:
            raise ValueError("state_slots: must be one a sequence for this model's cache, got None")
        return self.state_slots

    def entries(self, ratio: int) -> EntryView:
        """Return the view of compressed entries with `ratio` tokens each. The layers of the pass share it."""
        return self._views.setdefault(("entries", ratio), EntryView(self, ratio))

    def windows(self, window: int, ring: int) -> WindowView:
        """Return the view of windows of `window` tokens in rings of `ring` slots. The layers of the pass share it.
        Raise ValueError if next_n is above ring - window + 1, the number of new tokens for which a ring has room."""
        most = ring - window + 1
        if self.next_n > most:
            raise ValueError(f"batch: next_n must be at most {most} with this cache, got {self.next_n}")
        return self._views.setdefault(("windows", window, ring), WindowView(self, window, ring))

    def states(self, kept: int) -> StateView:
        """Return the view of a cache with `kept` states per sequence. The layers of the pass share it. Raise
        ValueError if next_n is above kept - 1."""
        if self.next_n >= kept:
            raise ValueError(f"batch: next_n must be at most {kept - 1} with this cache, got {self.next_n}")
        return self._views.setdefault(("states", kept), StateView(self, kept))

    def group_rows(self, groups: int, tokens: int) -> packing.GroupRows:
        """Return the `packing.GroupRows` for `tokens` tokens and `groups` groups of channels. The layers of the pass
        share it."""
        if (groups, tokens) not in self.groups:
            self.groups[groups, tokens] = packing.GroupRows.of(tokens, groups, self.device)
        return self.groups[groups, tokens]

    @cached_property
    def groups(self) -> dict[tuple[int, int], packing.GroupRows]:
        """Cached results of `group_rows`."""
        return {}

    @cached_property
    def _views(self) -> dict[tuple[str | int, ...], EntryView | WindowView | StateView]:
        return {}


def check_of_sequences(
    name: str, tensor: object, sequences: int, device: torch.device, source: str, *more: str
) -> None:
    """Raise TypeError or ValueError unless `tensor` is int32 [sequences, *more] on `device`. A `device` without an
    index accepts every device of its type. source: name of the argument that determines the number of sequences."""
    check_tensor(name, tensor, INT32, (sequences, *more), source)
    own = tensor.device
    if own.type != device.type or (device.index is not None and own.index != device.index):
        raise ValueError(f"{name}: must be on the batch's device {device}, got {own}")


def check_batch(batch: object, *, whole: bool = True) -> None:
    """Raise TypeError if `batch` is not a TokenBatch. If `whole`, raise ValueError for a batch that has only one rank's
    part of the tokens."""
    if not isinstance(batch, TokenBatch):
        raise TypeError(f"batch: must be a SequenceBatch or a DecodeBatch, got {type(batch).__name__}")
    if whole and batch.keyed is not batch:
        raise ValueError(
            "batch: a rank's share of tokens is for layers whose indexers are trained now: for passes within the "
            "IndexerStage that made it, which for a drafter is IndexerStage(.., drafter=True)"
        )


def check_tokens(x: torch.Tensor, positions: torch.Tensor) -> None:
    """Raise ValueError unless x has a row for each of the tokens, whose positions are `positions` [T]."""
    if len(x) != len(positions):
        raise ValueError(f"x: must have a row for each of the batch's {len(positions)} tokens, got {len(x)} rows")


def check_no_cache(cache: object, batch: TokenBatch) -> None:
    """Raise ValueError unless `cache` is None and all keys of the pass are new. For layers that `dsa_layers.fuse` has
    not converted."""
    if cache is not None:
        raise ValueError("cache: must be None before dsa_layers.fuse, which prepares a layer for inference")
    check_all_keys_are_new(batch)


def check_all_keys_are_new(batch: TokenBatch) -> None:
    if batch.query_lens != batch.key_lens:
        raise ValueError("cache: is needed when a sequence has more keys than new tokens")


def check_pages(batch: TokenBatch, page_size: int) -> None:
    """Raise ValueError unless the batch has pages of `page_size` tokens, the page size of the cache."""
    if batch.block_table is None:
        raise ValueError("batch: must have pages where there is a cache, got block_table=None")
    if batch.page_size != page_size:
        raise ValueError(f"page_size: must be the cache's {page_size}, got {batch.page_size}")


def check_pass(tokens: torch.Tensor, batch: TokenBatch, cache: Any) -> None:
    """Raise TypeError or ValueError unless `batch` is a batch of T tokens, `tokens` is int64 [T], and `cache` is a
    model's cache or None. The values of tokens are not checked, because the host would wait for the device."""
    check_batch(batch, whole=False)
    check_tensor("tokens", tokens, (torch.int64,), (sum(batch.query_lens),), "batch")
    if cache is not None and not hasattr(cache, "layer"):
        raise TypeError(f"cache: must be one of the model's make_cache, or None, got {type(cache).__name__}")
