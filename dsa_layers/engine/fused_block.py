"""`DecoderBlock` for inference."""

import torch

from dsa_layers.batch.selected import Selected
from dsa_layers.batch.token_batch import TokenBatch
from dsa_layers.cache.kv_cache import LayerCache
from dsa_layers.engine.joint_linear import norm_and_cast
from dsa_layers.models.deepseek_v32 import DecoderBlock
from dsa_layers.parallel.placement import placement_of
from dsa_layers.parallel.ranks import ALONE, Ranks


class FusedDecoderBlock(DecoderBlock):
    """`DecoderBlock` with a `PagedAttention` and a `FusedSwiGLU` or `FusedMoE`.

    One kernel adds the residual, applies the norm and casts the result of the norm to FP8.

    ranks     the ranks that compute the model. With several ranks, a block's input and output are this rank's local
              rows (`placement_of`)
    is_first  whether the block's input has all rows
    is_last   whether the block's output has all rows
    """

    ranks: Ranks = ALONE
    is_first = is_last = False

    @torch.no_grad()
    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: TokenBatch,
        cache: LayerCache | None = None,
        selected: Selected | None = None,
    ) -> tuple[torch.Tensor, Selected]:
        placement = placement_of(batch, self.ranks)
        x = placement.local(x) if self.is_first else x
        _, normed, cast = norm_and_cast(self.input_layernorm, x, self.self_attn.joint_layers())
        y, selected = self.self_attn(normed, cos, sin, batch, cache, selected, cast=cast)
        readers = self.mlp.joint_layers()
        x, normed, cast = norm_and_cast(self.post_attention_layernorm, y, readers, residual=x)
        x = self.mlp(normed, cast=cast, residual=x, placement=placement)
        return (placement.all_gather(x)[0] if self.is_last else x), selected
