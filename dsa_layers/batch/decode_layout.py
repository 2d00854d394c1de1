"""What of a decoding pass depends on how many sequences and tokens it has, and not on their lengths."""

from functools import cached_property

import torch

from dsa_layers.batch.group_rows import GroupRows


class DecodeLayout:
    """Of B sequences with `next_n` new tokens each. Who runs passes of a size again keeps it with their inputs: each
    tensor is made when it is first read, and no pass after that launches a kernel for it. A captured pass must have
    run once before, or what it reads of this would be made by the graph."""

    def __init__(self, count: int, next_n: int, device: torch.device) -> None:
        self.count, self.next_n, self.device = count, next_n, device
        self._groups: dict[tuple[int, int], GroupRows] = {}

    @cached_property
    def sequences(self) -> torch.Tensor:
        """int32 [B * next_n]: the sequence of each new token."""
        tokens = torch.arange(self.count * self.next_n, dtype=torch.int32, device=self.device)
        return tokens if self.next_n == 1 else tokens // self.next_n

    @cached_property
    def cu_query_lens(self) -> torch.Tensor:
        """int32 [B + 1]: where the sequences' new tokens begin."""
        last = self.count * self.next_n
        return torch.arange(0, last + 1, self.next_n, dtype=torch.int32, device=self.device)

    @cached_property
    def last_tokens(self) -> torch.Tensor:
        """int64 [B]: the row of each sequence's last token."""
        return self.cu_query_lens[1:].long() - 1

    def group_rows(self, groups: int, tokens: int) -> GroupRows:
        """As of `TokenBatch`."""
        if (groups, tokens) not in self._groups:
            self._groups[groups, tokens] = GroupRows.of(tokens, groups, self.device)
        return self._groups[groups, tokens]
