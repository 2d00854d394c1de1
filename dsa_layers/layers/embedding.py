"""The embedding of tokens."""

import torch
from torch import nn


class Embedding(nn.Module):
    """y[t] = weight[tokens[t]]. tokens int64 [...] -> [..., hidden]. Parameter: weight [vocabulary, hidden]."""

    def __init__(self, vocabulary: int, hidden: int, *, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, hidden, dtype=dtype))
        if self.weight.device.type != "meta":
            nn.init.normal_(self.weight)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(tokens, self.weight)
