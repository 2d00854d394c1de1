"""What tokens and compressed entries have in common: each new token sees some of them, and selects among these."""

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
    """The keys of a pass. Values that follow from these attributes are computed when they are first read, once for all
    layers of the pass:

    device           where the tensors are
    block_table      int32 [B, max_pages]: physical pages of each sequence, -1 after its last page; None without a cache
    page_size        keys per page; 0 without a cache
    query_lens       new tokens of each sequence
    key_lens         rows of each sequence where keys are packed: at least its keys after this pass. They are numbers on
                     the host, because shapes depend on them
    max_key_len      the largest of key_lens
    key_lens_tensor  int32 [B]: keys of each sequence after this pass
    sequences        int32 [T]: the sequence of each new token
    visible_keys     int32 [T]: how many keys of its sequence each new token may see
    least_visible    no token sees fewer, as far as the host knows
    next_n           in a decoding pass, the number of new tokens of each sequence
    """

    @cached_property
    def key_starts(self) -> torch.Tensor:
        """int32 [T]: for each new token, the row at which its sequence begins among all packed keys."""
        return packing.repeated(packing.starts(self.key_lens), self.query_lens, self.device)

    @property
    def visible_ranges(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        """(key_starts, visible_keys, an upper bound of these): what each new token may see among all packed keys."""
        return self.key_starts, self.visible_keys, self.max_key_len

    @property
    def visible_by_sequence(self) -> torch.Tensor:
        """int32 [B], or [B, next_n] of several: in a decoding pass, `visible_keys` as `fp8_paged_mqa_logits` takes
        it."""
        return self.visible_keys if self.next_n == 1 else self.visible_keys.unflatten(0, (-1, self.next_n))

    @cached_property
    def index_schedule(self) -> torch.Tensor:
        """The plan of `dsa.fp8_paged_mqa_logits` for these lengths."""
        return dsa.get_paged_mqa_logits_metadata(self.key_lens_tensor, self.page_size, dsa.num_sms(self.device))

    def slots_of(self, indices: torch.Tensor) -> torch.Tensor:
        """int32 [T, K]: the slots of the keys at positions `indices` [T, K] of each new token's sequence; -1 stays."""
        return packing.selected_slots(self.block_table, self.page_size, self.sequences, indices)

    def selected_counts(self, columns: int) -> torch.Tensor | None:
        """Return int32 [T]: how many of this many columns each new token has selected, at most all that it sees. Return
        None if no token sees fewer than `columns`. The tensor is made once for all layers of a pass."""
        if self.least_visible >= columns:
            return None
        if columns not in self._counts:
            self._counts[columns] = self.visible_keys.clamp(max=columns)
        return self._counts[columns]

    def most_selected(self, columns: int) -> torch.Tensor | None:
        """Return int32 [B] in a decoding pass: `selected_counts` of each sequence's last token, which sees the most.
        Numbers above `columns` mean all columns: the op compares, so no kernel runs here."""
        if self.least_visible >= columns:
            return None
        return self.visible_keys if self.next_n == 1 else self._last_visible

    @cached_property
    def _last_visible(self) -> torch.Tensor:
        # Made contiguous once, and not by the op in each layer.
        return self.visible_keys[self.next_n - 1 :: self.next_n].contiguous()

    @cached_property
    def _counts(self) -> dict[int, torch.Tensor]:
        return {}
