"""A pre-norm decoder block."""

import torch
from torch import nn

from dsa_layers.batch.token_batch import TokenBatch
from dsa_layers.cache.kv_cache import LayerCache
from dsa_layers.layers.attention import DSAAttention
from dsa_layers.layers.moe import MoE, SwiGLU
from dsa_layers.layers.norm import RMSNorm


class DecoderBlock(nn.Module):
    """x <- x + attention(norm(x)); x <- x + mlp(norm(x)).

    forward(x [T, hidden], cos, sin, batch, cache=None, selected=None) -> (x, selected), as of `DSAAttention`.
    Submodules by the checkpoint's names: input_layernorm, self_attn, post_attention_layernorm, mlp.
    """

    def __init__(self, hidden: int, self_attn: DSAAttention, mlp: MoE | SwiGLU, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(hidden, eps)
        self.self_attn = self_attn
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = mlp

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: TokenBatch,
        cache: LayerCache | None = None,
        selected: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        y, selected = self.self_attn(self.input_layernorm(x), cos, sin, batch, cache, selected)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), selected
