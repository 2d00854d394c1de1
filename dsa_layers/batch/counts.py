"""How many of a selection's columns count, for each new token."""

from functools import cached_property

import torch


class SelectedCounts:
    """Of a view whose tokens select among keys or entries.

    visible_keys   int32 [T]: how many of these each new token sees
    least_visible  no token sees fewer, as far as the host knows
    """

    visible_keys: torch.Tensor
    least_visible: int

    def selected_counts(self, columns: int) -> torch.Tensor | None:
        """int32 [T]: how many each new token has in so many columns, which are all that it sees if these are fewer;
        None if no token sees fewer. Made once for all layers of a pass."""
        if self.least_visible >= columns:
            return None
        if columns not in self._counts:
            self._counts[columns] = self.visible_keys.clamp(max=columns)
        return self._counts[columns]

    @cached_property
    def _counts(self) -> dict[int, torch.Tensor]:
        return {}
