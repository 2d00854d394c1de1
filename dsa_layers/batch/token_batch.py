"""What layers read of a pass's tokens, whether their lengths are known on the host or on the device."""

from typing import Any, Self

import torch

import dsa
from dsa.runtime.checks import INT32, check_tensor
from dsa_layers.batch import packing
from dsa_layers.batch.caching import cached_property
from dsa_layers.batch.counts import SelectedCounts
from dsa_layers.batch.entry_view import EntryView
from dsa_layers.batch.window_view import WindowView


class TokenBatch(SelectedCounts):
    """T new tokens of B sequences, and the places of their keys. Values that follow from these are computed when they
    are first read, once for all layers of a pass. Subclasses have these attributes:

    device               where the tensors are
    block_table          int32 [B, max_pages]: physical pages of each sequence, -1 after its last page; None without a
                         cache
    page_size            tokens per page; 0 without a cache
    query_lens           new tokens of each sequence
    key_lens             rows of each sequence where keys are packed: at least its tokens after this pass, cached and
                         new ones. They are numbers on the host, because shapes depend on them
    max_key_len          the largest of key_lens
    least_visible        no new token sees fewer keys, including its own, as far as the host knows
    is_decode            whether every sequence has `next_n` new tokens, one or a few
    next_n               that number; 1 for another batch
    positions            int64 [T]: each new token's position in its sequence
    sequences            int32 [T]: the sequence of each new token
    key_lens_tensor      int32 [B]: tokens of each sequence after this pass
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
        """int32 [T]: how many keys of its sequence each new token may see, including its own."""
        return (self.positions + 1).to(torch.int32)

    @cached_property
    def key_starts(self) -> torch.Tensor:
        """int32 [T]: for each new token, the row at which its sequence begins among all packed keys."""
        return packing.repeated(packing.starts(self.key_lens), self.query_lens, self.device)

    @property
    def visible_ranges(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        """(key_starts, visible_keys, an upper bound of these): what each new token may see among all packed keys."""
        return self.key_starts, self.visible_keys, self.max_key_len

    @cached_property
    def cu_key_lens(self) -> torch.Tensor:
        """int32 [B + 1]: where the sequences begin among all packed keys."""
        return packing.offsets(self.key_lens, self.device)

    @cached_property
    def key_slots(self) -> torch.Tensor:
        """int64 [sum(key_lens)]: the slots of all keys, sequence after sequence; -1 where there is no page."""
        return dsa.slot_mapping(self.block_table, self.cu_key_lens, None, sum(self.key_lens), self.page_size)

    def slots_of(self, indices: torch.Tensor) -> torch.Tensor:
        """int32 [T, K]: the slots of the keys at positions `indices` [T, K] of each new token's sequence; -1 stays."""
        return packing.selected_slots(self.block_table, self.page_size, self.sequences, indices)

    @cached_property
    def index_schedule(self) -> torch.Tensor:
        """The plan of `dsa.fp8_paged_mqa_logits` for these lengths."""
        return dsa.get_paged_mqa_logits_metadata(self.key_lens_tensor, self.page_size, dsa.num_sms(self.device))

    @cached_property
    def mla_schedule(self) -> dsa.FlashMLASchedMeta:
        """The plan of `dsa.flash_mla_with_kvcache` over all keys. The first layer of the pass fills it."""
        return dsa.get_mla_metadata()[0]

    def entries(self, ratio: int) -> EntryView:
        """Return the view of the compressed entries of every `ratio` tokens, the same for all layers of the pass."""
        return self._views.setdefault(("entries", ratio), EntryView(self, ratio))

    def windows(self, window: int, ring: int) -> WindowView:
        """Return the view of the sliding windows of this many tokens, in rings of this many slots, the same for all
        layers of the pass. Raises ValueError for more tokens to decode than a ring has room for."""
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
    """Raise TypeError or ValueError unless `tensor` is int32 [sequences, *more] on a device, which may have no index.
    source: the argument that has the number of sequences."""
    check_tensor(name, tensor, INT32, (sequences, *more), source)
    own = tensor.device
    if own.type != device.type or (device.index is not None and own.index != device.index):
        raise ValueError(f"{name}: must be on the batch's device {device}, got {own}")
