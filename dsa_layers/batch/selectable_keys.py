"""The keys among which a new token selects: the base class of token batches and of views of compressed entries."""

from collections.abc import Callable
from typing import Any

import torch

import dsa
from dsa_layers.batch import packing


class cached_property:
    """functools.cached_property without its lock, which torch.compile does not trace in Python 3.11."""

    def __init__(self, compute: Callable[[Any], Any]) -> None:
        self._compute, self.__doc__ = compute, compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        value = self._compute(instance)
        object.__setattr__(instance, self._name, value)
        return value


class SelectableKeys:
    """The keys of a pass over T new tokens of B sequences. Subclasses have the attributes below. A cached property is
    computed when a layer first reads it; the other layers of the pass reuse the value.

    device           device of the tensors
    block_table      int32 [B, max_pages]: physical pages of each sequence, -1 after its last page; None without a cache
    page_size        keys per page; 0 without a cache
    query_lens       new tokens of each sequence
    key_lens         rows that each sequence has in a tensor of all packed keys: at least the sequence's keys after this
                     pass. Python integers, because shapes depend on them
    max_key_len      upper bound of key_lens_tensor, a Python integer
    key_lens_tensor  int32 [B]: keys of each sequence after this pass
    sequences        int32 [T]: the sequence of each new token
    visible_keys     int32 [T]: for each new token, the number of keys of its sequence that the token may see
    least_visible    lower bound of visible_keys, a Python integer; padding rows may see fewer keys
    next_n           new tokens per sequence in a decoding pass
    """

    @cached_property
    def key_starts(self) -> torch.Tensor:
        """int32 [T]: for each new token, the first row of its sequence among all packed keys."""
        return packing.repeated(packing.starts(self.key_lens), self.query_lens, self.device)

    @property
    def visible_ranges(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        """(key_starts, visible_keys, max_key_len): the first packed key and the number of keys that each new token may
        see, and an upper bound of these numbers."""
        return self.key_starts, self.visible_keys, self.max_key_len

    @property
    def visible_by_sequence(self) -> torch.Tensor:
        """`visible_keys` of a decoding pass, for `dsa.fp8_paged_mqa_logits`: int32 [B] if next_n is 1, else [B,
        next_n]."""
        return self.visible_keys if self.next_n == 1 else self.visible_keys.unflatten(0, (-1, self.next_n))

    @cached_property
    def index_schedule(self) -> torch.Tensor:
        """The schedule of `dsa.fp8_paged_mqa_logits` for the lengths `key_lens_tensor`."""
        return dsa.get_paged_mqa_logits_metadata(self.key_lens_tensor, self.page_size, dsa.num_sms(self.device))

    def slots_of(self, indices: torch.Tensor) -> torch.Tensor:
        """Return int32 [T, K]: the slots of the keys at positions `indices` [T, K] in each new token's sequence; -1
        stays -1."""
        return packing.selected_slots(self.block_table, self.page_size, self.sequences, indices)

    def selected_counts(self, columns: int) -> torch.Tensor | None:
        """Return int32 [T]: min(columns, visible_keys), the number of keys that each new token selects if it selects up
        to `columns` keys. Return None if `least_visible` is at least `columns`. The layers of a pass share the
        tensor."""
        if self.least_visible >= columns:
            return None
        if columns not in self._counts:
            self._counts[columns] = self.visible_keys.clamp(max=columns)
        return self._counts[columns]

    def most_selected(self, columns: int) -> torch.Tensor | None:
        """Return int32 [B], in a decoding pass: the number of keys that each sequence's last token sees. Return None if
        `least_visible` is at least `columns`. The result is for topk_length or extra_topk_length of
        `dsa.flash_mla_with_kvcache` with indices of `columns` columns. A number above `columns` counts as `columns`."""
        if self.least_visible >= columns:
            return None
        return self.visible_keys if self.next_n == 1 else self._last_visible

    @cached_property
    def _last_visible(self) -> torch.Tensor:
        # Make the tensor contiguous once per pass; otherwise the op would copy it in each layer.
        return self.visible_keys[self.next_n - 1 :: self.next_n].contiguous()

    @cached_property
    def _counts(self) -> dict[int, torch.Tensor]:
        return {}
