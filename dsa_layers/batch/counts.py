"""How many of the columns of a selection count, for each new token: the same for all layers of a pass."""

import torch


class CountsByColumns(dict[int, torch.Tensor]):
    """columns -> int32 [T]."""

    def of(self, columns: int, visible_keys: torch.Tensor) -> torch.Tensor:
        """visible_keys int32 [T], but at most `columns`."""
        if columns not in self:
            self[columns] = visible_keys.clamp(max=columns)
        return self[columns]
