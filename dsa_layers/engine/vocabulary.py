"""The embedding and the language model's head for inference, on one or several ranks."""

import torch
from torch import nn

import dsa
from dsa.kernels.moe.limits import CHANNEL_MULTIPLE, COMBINE_DTYPES
from dsa.runtime import backends
from dsa_layers.engine.fp32_product import fp32_product
from dsa_layers.layers.linear import Embedding, LanguageModelHead
from dsa_layers.parallel.ranks import ALONE, Ranks


class SplitEmbedding(Embedding):
    """`Embedding` split over ranks. Rank r has the len(weight) tokens from r * len(weight) on."""

    ranks: Ranks = ALONE

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.ranks.sum(self._own(tokens - self.ranks.rank * len(self.weight)))

    def _own(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of rows in [0, len(weight)), which this rank has; 0 for all other rows."""
        count, channels = self.weight.shape
        known = str(self.weight.dtype).removeprefix("torch.") in COMBINE_DTYPES
        if known and channels % CHANNEL_MULTIPLE == 0 and backends.runs_kernel("combine_experts", self.weight):
            # One kernel, which returns 0 for rows outside the weight. Where the kernel is not available, do not call
            # this op, because its reference implementation would copy the weight.
            return dsa.combine_experts(self.weight, rows.reshape(-1, 1)).view(*rows.shape, channels)
        own = (rows >= 0) & (rows < count)
        y = nn.functional.embedding(rows.clamp(0, count - 1), self.weight)
        return y.masked_fill(~own[..., None], 0)


class FusedHead(LanguageModelHead):
    """`LanguageModelHead` without gradients. Each rank computes some columns of the logits; the result has all."""

    ranks: Ranks = ALONE

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ranks.join_columns(fp32_product(x, self.weight))
