"""What layers read of a pass's tokens, whether their lengths are known on the host or on the device."""

from typing import Any, Self

import torch

import dsa
from dsa.runtime.checks import INT32, check_tensor
from dsa_layers.batch import packing
from dsa_layers.batch.entry_view import EntryView
from dsa_layers.batch.selectable_keys import SelectableKeys, cached_property
from dsa_layers.batch.window_view import WindowView


class TokenBatch(SelectableKeys):
    """T new tokens of B sequences, and the places of their keys: the tokens of these sequences. In addition to those of
    `SelectableKeys`, subclasses have these attributes:

    is_decode            whether every sequence has `next_n` new tokens, one or a few
    positions            int64 [T]: each new token's position in its sequence
    earlier_lens_tensor  int32 [B]: tokens of each sequence before the new ones
    cu_query_lens        int32 [B + 1]: where the sequences' new tokens begin among the T
    last_tokens          int64 [B]: the row of each sequence's last token among the T
    state_slots_tensor   int32 [B]: each sequence's row of the tensors that a cache stores per sequence and not per page
    """

    @classmethod
    def unchecked(cls, **fields: Any) -> Self:
        """Make a batch of these fields without the constructor's checks, which would take time in each step. Values of
        cached properties are accepted too."""
        batch = object.__new__(cls)
        vars(batch).update(fields)
        return batch

    @cached_property
    def slots(self) -> torch.Tensor:
        """int64 [T]: page * page_size + offset of each new token in the cache."""
        return dsa.slot_mapping(
            self.block_table, self.cu_query_lens, self.key_lens_tensor, sum(self.query_lens), self.page_size
        )

    @cached_property
    def visible_keys(self) -> torch.Tensor:
        return (self.positions + 1).to(torch.int32)

    @property
    def keyed(self) -> Self:
        """The same tokens with all keys that they see. Another batch if ranks share the tokens of sequences, as in
        `dsa_layers.parallel.context.ContextBatch`."""
        return self

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, ...] of the tokens -> [S, ...] of the keys of `keyed`, with gradients."""
        return x

    @cached_property
    def cu_key_lens(self) -> torch.Tensor:
        """int32 [B + 1]: where the sequences begin among all packed keys."""
        return packing.offsets(self.key_lens, self.device)

    @cached_property
    def key_slots(self) -> torch.Tensor:
        """int64 [sum(key_lens)]: the slots of all keys, sequence after sequence; -1 where there is no page."""
        return dsa.slot_mapping(self.block_table, self.cu_key_lens, None, sum(self.key_lens), self.page_size)

    @cached_property
    def mla_schedule(self) -> dsa.FlashMLASchedMeta:
        """The plan of `dsa.flash_mla_with_kvcache` over all keys. The first layer of the pass fills it."""
        return dsa.get_mla_metadata()[0]

    def entries(self, ratio: int) -> EntryView:
        """Return the view of the compressed entries of every `ratio` tokens, the same for all layers of the pass."""
        return self._views.setdefault(("entries", ratio), EntryView(self, ratio))

    def windows(self, window: int, ring: int) -> WindowView:
        """Return the view of windows of `window` tokens in rings of `ring` slots. All layers of the pass share one
        view. Raises ValueError if a sequence has more tokens to decode than a ring has room for."""
        most = ring - window + 1
        if self.next_n > most:
            raise ValueError(f"batch: next_n must be at most {most} with this cache, got {self.next_n}")
        return self._views.setdefault(("windows", window, ring), WindowView(self, window, ring))

    def group_rows(self, groups: int, tokens: int) -> packing.GroupRows:
        """Return the rows of this many groups of channels of this many new tokens, the same for all layers."""
        if (groups, tokens) not in self.groups:
            self.groups[groups, tokens] = packing.GroupRows.of(tokens, groups, self.device)
        return self.groups[groups, tokens]

    @cached_property
    def groups(self) -> dict[tuple[int, int], packing.GroupRows]:
        """What `group_rows` has made."""
        return {}

    @cached_property
    def _views(self) -> dict[tuple[str | int, ...], EntryView | WindowView]:
        return {}


def check_of_sequences(
    name: str, tensor: object, sequences: int, device: torch.device, source: str, *more: str
) -> None:
    """Raise TypeError or ValueError unless `tensor` is int32 [sequences, *more] on `device`. A `device` without an
    index stands for every device of its type. source: the argument that determines the number of sequences."""
    check_tensor(name, tensor, INT32, (sequences, *more), source)
    own = tensor.device
    if own.type != device.type or (device.index is not None and own.index != device.index):
        raise ValueError(f"{name}: must be on the batch's device {device}, got {own}")


def check_batch(batch: object, *, whole: bool = True) -> None:
    """Raise TypeError for anything but a batch. whole: raise ValueError for a rank's share of the tokens."""
    if not isinstance(batch, TokenBatch):
        raise TypeError(f"batch: must be a SequenceBatch or a DecodeBatch, got {type(batch).__name__}")
    if whole and batch.keyed is not batch:
        raise ValueError(
            "batch: a rank's share of tokens is for layers whose indexers are trained now: for passes within the "
            "IndexerStage that made it, which for a drafter is IndexerStage(.., drafter=True)"
        )


def check_pages(batch: TokenBatch, page_size: int) -> None:
    """Raise ValueError unless the batch has pages of this many tokens, as the cache has."""
    if batch.block_table is None:
        raise ValueError("batch: must have pages where there is a cache, got block_table=None")
    if batch.page_size != page_size:
        raise ValueError(f"page_size: must be the cache's {page_size}, got {batch.page_size}")


def check_pass(tokens: torch.Tensor, batch: TokenBatch, cache: Any) -> None:
    """Raise TypeError or ValueError unless tokens int64 [T] are as many as the batch has, and the cache is one of a
    model. The values of tokens are not checked, because the host would have to wait for the device."""
    check_batch(batch, whole=False)
    check_tensor("tokens", tokens, (torch.int64,), (sum(batch.query_lens),), "batch")
    if cache is not None and not hasattr(cache, "layer"):
        raise TypeError(f"cache: must be one of the model's make_cache, or None, got {type(cache).__name__}")
