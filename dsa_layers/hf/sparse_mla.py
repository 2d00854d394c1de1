"""Attention of transformers' DeepSeek-V3.2 and GLM-5 models: dsa's `DSAAttention` on the parameters of transformers'
layers."""

from typing import Any, ClassVar

import torch
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as deepseek
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm

from dsa_layers.batch.selected import Selected
from dsa_layers.cache.kv_cache import LayerCache
from dsa_layers.engine.paged_attention import PagedAttention
from dsa_layers.engine.paged_indexer import PagedIndexer
from dsa_layers.hf.lengths import Pass
from dsa_layers.hf.paged_layer import PagedLayer, Storage
from dsa_layers.hf.parts import AttentionInPlace, HeadWeightsInPlace, RMSNormInPlace, alias
from dsa_layers.layers.attention import DSAAttention
from dsa_layers.layers.key_selection import SCORE_ACCUMULATORS, WORKSPACE

PAGE_SIZE = 64  # tokens per page; the kernel for index scores accepts pages of 32 or 64 FP8 keys


class IndexerInPlace(HeadWeightsInPlace):
    """Base class of indexers. A subclass lists this class before transformers' class and `PagedIndexer`, so that this
    class overrides both.

    quantize  whether index queries and keys are in FP8
    rope      keyword arguments of `dsa.apply_rotary` for index queries and keys
    """

    quantize = False
    q_input_norm = softmax_scaling = None  # transformers' indexers have none
    rope: ClassVar[dict[str, Any]]
    workspace, accumulators = WORKSPACE, SCORE_ACCUMULATORS
    top_k = alias("index_topk")


class SparseMLAInPlace(AttentionInPlace):
    """Base class of attention layers. A subclass lists this class before transformers' class and `PagedAttention`, so
    that this class overrides both."""

    indexer_stage: ClassVar[None] = None  # an open `IndexerStage` stores itself in this attribute of each layer
    gate = gate_proj = sinks = softmax_scaling = k_rope_only_layernorm = None  # transformers' layers have none
    has_rope = True
    n_heads = alias("num_heads")
    nope_dim = alias("qk_nope_head_dim")
    rope_dim = alias("qk_rope_head_dim")
    v_dim = alias("v_head_dim")
    softmax_scale = alias("scaling")

    def attend_packed(
        self, x: torch.Tensor, rope: Any, tokens: Pass, layer: PagedLayer | None, selected: Selected | None
    ) -> tuple[torch.Tensor, Selected]:
        angles = tokens.angles(rope, self.rope_dim)
        if torch.is_grad_enabled() or self.indexer_stage is not None:
            rows = None if selected is None else selected.indices("rows", tokens.batch)
            y, rows = DSAAttention.forward(self, x, *angles, tokens.batch, None, rows)
            return y, Selected(rows, tokens.batch)
        cache = None
        if layer is not None:
            cache = LayerCache(layer["latent"], None if self.indexer is None else layer["index"])
        return PagedAttention.forward(self, x, *angles, tokens.batch, cache, selected)

    def _storage(self, x: torch.Tensor) -> Storage:
        pages = {"latent": (1, self.kv_lora_rank + self.rope_dim, x.dtype)}
        if self.indexer is not None:
            dim = self.indexer.head_dim
            pages["index"] = (1, dim + 4, torch.uint8) if self.indexer.quantize else (1, dim, x.dtype)
        return Storage(PAGE_SIZE, pages)


class SparseDeepseekV32RMSNorm(RMSNormInPlace, deepseek.DeepseekV32RMSNorm):
    """Replaces DeepseekV32RMSNorm."""


class SparseDeepseekV32Indexer(IndexerInPlace, deepseek.DeepseekV32Indexer, PagedIndexer):
    """Replaces DeepseekV32Indexer."""

    rope: ClassVar[dict[str, Any]] = {"interleaved": False, "dims": "first"}


class SparseDeepseekV32Attention(SparseMLAInPlace, deepseek.DeepseekV32Attention, PagedAttention):
    """Replaces DeepseekV32Attention."""


class SparseGlmMoeDsaRMSNorm(RMSNormInPlace, glm.GlmMoeDsaRMSNorm):
    """Replaces GlmMoeDsaRMSNorm."""


class SparseGlmMoeDsaIndexer(IndexerInPlace, glm.GlmMoeDsaIndexer, PagedIndexer):
    """Replaces GlmMoeDsaIndexer."""

    rope: ClassVar[dict[str, Any]] = {"interleaved": True, "dims": "first"}


class SparseGlmMoeDsaAttention(SparseMLAInPlace, glm.GlmMoeDsaAttention, PagedAttention):
    """Replaces GlmMoeDsaAttention."""

    returns_selected = True


CLASSES: dict[type, type] = {
    deepseek.DeepseekV32RMSNorm: SparseDeepseekV32RMSNorm,
    deepseek.DeepseekV32Indexer: SparseDeepseekV32Indexer,
    deepseek.DeepseekV32Attention: SparseDeepseekV32Attention,
    glm.GlmMoeDsaRMSNorm: SparseGlmMoeDsaRMSNorm,
    glm.GlmMoeDsaIndexer: SparseGlmMoeDsaIndexer,
    glm.GlmMoeDsaAttention: SparseGlmMoeDsaAttention,
}
