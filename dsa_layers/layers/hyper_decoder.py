"""A decoder block over several residual streams."""

from collections.abc import Sequence

import torch
from torch import nn

from dsa_layers.batch.rows import ALL_ROWS, Rows
from dsa_layers.batch.token_batch import TokenBatch
from dsa_layers.cache.compressed_kv_cache import CompressedLayerCache
from dsa_layers.layers.compressed_attention import Angles, CompressedAttention
from dsa_layers.layers.hyper_connections import HyperConnection
from dsa_layers.layers.hyper_sublayer import MixedStreams, enter, leave
from dsa_layers.layers.moe import MoE
from dsa_layers.layers.norm import RMSNorm
from dsa_layers.layers.norm_and_cast import given, takes


class HyperDecoderBlock(nn.Module):
    """Attention, then experts, each between the streams' collapse and expansion: X [T, n, hidden] -> [T, n, hidden].

    x = collapse(X); X <- expand(sublayer(norm(x)), X), by `hc_attn` and `hc_ffn`. rows: of X, where several processes
    have parts of the sublayers; tokens are all rows'. following: the hyper-connection that collapses the result, whose
    projection may then come with the streams: `MixedStreams`, which the block that it is of takes.
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
        streams: torch.Tensor | MixedStreams,
        tokens: torch.Tensor,
        rope: Angles,
        entry_rope: Angles | None,
        batch: TokenBatch,
        cache: CompressedLayerCache | None = None,
        rows: Rows = ALL_ROWS,
        *,
        following: HyperConnection | None = None,
    ) -> torch.Tensor | MixedStreams:
        x, cast, weights = enter(self.hc_attn, streams, self.attn_norm, self.attn)
        y = self.attn(x, rope, entry_rope, batch, cache, **given(cast, rows))
        streams = leave(self.hc_attn, y, streams, weights, self.hc_ffn)
        x, cast, weights = enter(self.hc_ffn, streams, self.ffn_norm, self.ffn)
        y = self.ffn(x, tokens, **given(cast, rows))
        return leave(self.hc_ffn, y, streams, weights, following)


def following(blocks: Sequence[nn.Module], i: int) -> dict[str, HyperConnection]:
    """The hyper-connection that reads what block number i gives, as the argument of the block's call: if there is a
    next block, and neither hooks nor other modules in the place of the two are to see the streams."""
    if i + 1 == len(blocks) or not takes(blocks[i], "following") or not takes(blocks[i + 1], "following"):
        return {}
    return {"following": blocks[i + 1].hc_attn}
