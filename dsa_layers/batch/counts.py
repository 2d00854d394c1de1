"""The number of valid columns of a selection, for each new token."""

import torch

from dsa_layers.batch.caching import cached_property


class SelectedCounts:
    """A base class of batches and views whose tokens select among keys or entries. Subclasses have these attributes:

    visible_keys   int32 [T]: how many keys or entries each new token sees
    least_visible  no token sees fewer, as far as the host knows
    next_n         in a decoding pass, the number of new tokens of each sequence
    """

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

    @property
    def visible_by_sequence(self) -> torch.Tensor:
        """int32 [B], or [B, next_n] of several: in a decoding pass, `visible_keys` as `fp8_paged_mqa_logits` takes
        it."""
        return self.visible_keys if self.next_n == 1 else self.visible_keys.unflatten(0, (-1, self.next_n))

    @cached_property
    def _counts(self) -> dict[int, torch.Tensor]:
        return {}
