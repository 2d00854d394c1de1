"""A decoder block over several residual streams."""

import torch
from torch import nn

from dsa_layers.batch.token_batch import TokenBatch
from dsa_layers.cache.compressed_kv_cache import CompressedLayerCache
from dsa_layers.layers.compressed_attention import Angles, CompressedAttention
from dsa_layers.layers.hyper_connections import HyperConnection
from dsa_layers.layers.moe import MoE
from dsa_layers.layers.norm import RMSNorm


class HyperDecoderBlock(nn.Module):
    """Attention, then experts, each between the streams' collapse and expansion: X [T, n, hidden] -> [T, n, hidden].

    x = collapse(X); X <- expand(sublayer(norm(x)), X), by `hc_attn` and `hc_ffn`.
    forward(X, tokens int64 [T], rope, entry_rope, batch, cache=None), the last four as of `CompressedAttention`.
    Submodules: hc_attn, attn_norm, attn, hc_ffn, ffn_norm, ffn.
    """

    def __init__(
        self,
        hidden: int,
        attn: CompressedAttention,
        ffn: MoE,
        *,
        hc_attn: HyperConnection,
        hc_ffn: HyperConnection,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.hc_attn, self.attn_norm, self.attn = hc_attn, RMSNorm(hidden, eps), attn
        self.hc_ffn, self.ffn_norm, self.ffn = hc_ffn, RMSNorm(hidden, eps), ffn

    def forward(
        self,
        streams: torch.Tensor,
        tokens: torch.Tensor,
        rope: Angles,
        entry_rope: Angles | None,
        batch: TokenBatch,
        cache: CompressedLayerCache | None = None,
    ) -> torch.Tensor:
        x, *weights = self.hc_attn.collapse(streams)
        y = self.attn(self.attn_norm(x), rope, entry_rope, batch, cache)
        streams = self.hc_attn.expand(y, streams, *weights)
        x, *weights = self.hc_ffn.collapse(streams)
        y = self.ffn(self.ffn_norm(x), tokens)
        return self.hc_ffn.expand(y, streams, *weights)
