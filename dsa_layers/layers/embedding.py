"""The embedding of tokens."""

import torch
from torch import nn

import dsa
from dsa.kernels.moe.limits import CHANNEL_MULTIPLE, COMBINE_DTYPES
from dsa.runtime import backends
from dsa_layers.layers.shares import Shares


class Embedding(nn.Module):
    """y[t] = weight[tokens[t]]. tokens int64 [...] -> [..., hidden]. Parameter: weight [vocabulary, hidden].

    A part of it has the rows from `first` on; y is 0 for tokens of other parts.
    """

    shares = Shares(rows=("weight",), counts={"count": "tokens"}, blocks=False)

    def __init__(self, vocabulary: int, hidden: int, *, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.vocabulary, self.count, self.first = vocabulary, vocabulary, 0
        self.weight = nn.Parameter(torch.empty(vocabulary, hidden, dtype=dtype))
        if self.weight.device.type != "meta":
            nn.init.normal_(self.weight)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.count == self.vocabulary:
            return nn.functional.embedding(tokens, self.weight)
        rows = tokens - self.first
        if self._in_one_kernel():
            # Where what follows are seven: a row that is not there counts as zero.
            return dsa.combine_experts(self.weight, rows.reshape(-1, 1)).view(*tokens.shape, self.weight.shape[1])
        own = (rows >= 0) & (rows < self.count)
        y = nn.functional.embedding(rows.clamp(0, self.count - 1), self.weight)
        return y.masked_fill(~own[..., None], 0)

    def _in_one_kernel(self) -> bool:
        """Whether there is one: not beside a gradient, and of dtypes and sizes that it takes. Its reference would copy
        the weights."""
        known = str(self.weight.dtype).removeprefix("torch.") in COMBINE_DTYPES
        takes = known and self.weight.shape[1] % CHANNEL_MULTIPLE == 0 and not torch.is_grad_enabled()
        return takes and backends.runs_kernel("combine_experts", self.weight)
