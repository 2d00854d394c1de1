"""DeepSeek-V4's model on several ranks."""

import torch

from dsa_layers.batch.token_batch import TokenBatch
from dsa_layers.cache.compressed_kv_cache import CompressedKVCache
from dsa_layers.models.deepseek_v4 import DeepseekV4ForCausalLM
from dsa_layers.parallel.placement import placement_of
from dsa_layers.parallel.ranks import ALONE, Ranks


class SplitDeepseekV4(DeepseekV4ForCausalLM):
    """`DeepseekV4ForCausalLM` on several ranks.

    In a sharded pass, each layer returns the residual streams of this rank's rows only. `forward` collapses the streams
    to one before the ranks gather all rows.
    """

    ranks: Ranks = ALONE

    def forward(
        self,
        tokens: torch.Tensor,
        batch: TokenBatch,
        cache: CompressedKVCache | None = None,
        *,
        all_tokens: bool = False,
    ) -> torch.Tensor:
        placement = placement_of(batch, self.ranks)
        if not placement.sharded:
            return super().forward(tokens, batch, cache, all_tokens=all_tokens)
        (x,) = placement.all_gather(self.hc_head(super().states(tokens, batch, cache)))
        return self.head(self.norm(x if all_tokens else x[batch.last_tokens]))

    def states(self, tokens: torch.Tensor, batch: TokenBatch, cache: CompressedKVCache | None = None) -> torch.Tensor:
        (streams,) = placement_of(batch, self.ranks).all_gather(super().states(tokens, batch, cache))
        return streams

    def first_streams(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.ranks.size == 1:
            return super().first_streams(tokens)
        return self.embed(tokens)[:, None].expand(-1, self.config.hc_mult, -1).contiguous()
