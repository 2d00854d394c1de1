"""Where rows of several groups of channels go when each group's are laid together, and back."""

from typing import NamedTuple

import torch


class GroupRows(NamedTuple):
    """T tokens with a row for each of G groups. to_groups int32 [T * G, 1]: token t's row of group g, the t * G + g-th,
    is the g * T + t-th where each group's rows are together; to_tokens int32 [G * T, 1]: the way back; ends int32 [G]:
    where the groups end then."""

    to_groups: torch.Tensor
    to_tokens: torch.Tensor
    ends: torch.Tensor

    @classmethod
    def of(cls, tokens: int, groups: int, device: torch.device) -> "GroupRows":
        """Of so many tokens and groups."""
        rows = torch.arange(tokens * groups, dtype=torch.int32, device=device)
        to_groups = rows.view(groups, tokens).T.reshape(-1, 1)
        to_tokens = rows.view(tokens, groups).T.reshape(-1, 1)
        return cls(to_groups, to_tokens, torch.arange(1, groups + 1, dtype=torch.int32, device=device) * tokens)
