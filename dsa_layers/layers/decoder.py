"""A pre-norm decoder block."""

import torch
from torch import nn

from dsa_layers.batch.rows import ALL_ROWS, Rows
from dsa_layers.batch.token_batch import TokenBatch
from dsa_layers.cache.kv_cache import LayerCache
from dsa_layers.layers.attention import DSAAttention
from dsa_layers.layers.moe import MoE, SwiGLU
from dsa_layers.layers.norm import RMSNorm
from dsa_layers.layers.norm_and_cast import cast_readers, given, norm_and_cast, takes
from dsa_layers.layers.selection import Selection


class DecoderBlock(nn.Module):
    """x <- x + attention(norm(x)); x <- x + mlp(norm(x)). x [T, hidden] -> [T, hidden].

    selection: as for DSAAttention. rows: of x, where several processes have parts of the sublayers.
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
        selection: Selection | None = None,
        rows: Rows = ALL_ROWS,
    ) -> torch.Tensor:
        _, normed, cast = norm_and_cast(self.input_layernorm, x, cast_readers(self.self_attn))
        attended = self.self_attn(normed, cos, sin, batch, cache, selection, **given(cast, rows))
        readers = cast_readers(self.mlp)
        x, normed, cast = norm_and_cast(self.post_attention_layernorm, attended, readers, residual=x)
        if takes(self.mlp, "residual"):
            return self.mlp(normed, **given(cast, rows), residual=x)
        return x + self.mlp(normed, **given(cast, rows))
