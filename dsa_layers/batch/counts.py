"""How many of a selection's columns count, for each new token."""

from functools import cached_property

import torch


class SelectedCounts:
    """Of a view whose tokens select among keys or entries.

    visible_keys   int32 [T]: how many of these each new token sees
    least_visible  no token sees fewer, as far as the host knows
    next_n         in a decoding pass, how many new tokens each sequence has
    """

    visible_keys: torch.Tensor
    least_visible: int
    next_n: int

    def selected_counts(self, columns: int) -> torch.Tensor | None:
        """int32 [T]: how many each new token has in so many columns, which are all that it sees if these are fewer;
        None if no token sees fewer. Made once for all layers of a pass."""
        if self.least_visible >= columns:
            return None
        if columns not in self._counts:
            self._counts[columns] = self.visible_keys.clamp(max=columns)
        return self._counts[columns]

    def most_selected(self, columns: int) -> torch.Tensor | None:
        """int32 [B]: in a decoding pass, how many count for each sequence's last token, which sees the most; None as of
        `selected_counts`. More than `columns` mean all of them: the op compares, and no kernel runs for it here."""
        if self.least_visible >= columns:
            return None
        return self.visible_keys if self.next_n == 1 else self._last_visible

    @cached_property
    def _last_visible(self) -> torch.Tensor:
        """Once for all layers of a pass: the op would make it contiguous in each."""
        return self.visible_keys[self.next_n - 1 :: self.next_n].contiguous()

    @property
    def visible_by_sequence(self) -> torch.Tensor:
        """int32 [B], or [B, next_n] of several: in a decoding pass, `visible_keys` as `fp8_paged_mqa_logits` has it."""
        return self.visible_keys if self.next_n == 1 else self.visible_keys.unflatten(0, (-1, self.next_n))

    @cached_property
    def _counts(self) -> dict[int, torch.Tensor]:
        return {}
