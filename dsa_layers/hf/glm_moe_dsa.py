"""GLM-5's classes in transformers, and ours in their places."""

from typing import Any, ClassVar

import torch
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as theirs

from dsa_layers.batch.selected import Selected
from dsa_layers.engine.paged_attention import PagedAttention
from dsa_layers.engine.paged_indexer import PagedIndexer
from dsa_layers.hf.lengths import TokenLengths
from dsa_layers.hf.paged_layer import cache_of
from dsa_layers.hf.parts import RMSNormInPlace
from dsa_layers.hf.sparse_mla import IndexerInPlace, SparseMLAInPlace


class SparseGlmMoeDsaRMSNorm(RMSNormInPlace, theirs.GlmMoeDsaRMSNorm):
    original = theirs.GlmMoeDsaRMSNorm


class SparseGlmMoeDsaIndexer(IndexerInPlace, theirs.GlmMoeDsaIndexer, PagedIndexer):
    original = theirs.GlmMoeDsaIndexer
    rope: ClassVar[dict[str, Any]] = {"interleaved": True, "dims": "first"}


class FP8GlmMoeDsaIndexer(SparseGlmMoeDsaIndexer):
    quantize = True


class SparseGlmMoeDsaAttention(SparseMLAInPlace, theirs.GlmMoeDsaAttention, PagedAttention):
    """Passes on what was `Selected`, in place of transformers' top-k indices."""

    original = theirs.GlmMoeDsaAttention

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: TokenLengths,
        cache: Any = None,
        position_ids: torch.Tensor | None = None,
        prev_topk_indices: Selected | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None, Selected]:
        self.check(attention_mask, position_ids, options)
        selected = prev_topk_indices if self.indexer is None else None
        if self.indexer is None and not isinstance(selected, Selected):
            raise ValueError(
                "prev_topk_indices: a layer without an indexer needs what a layer before it selected, got "
                f"{type(selected).__name__}"
            )
        arguments = hidden_states, position_embeddings, attention_mask, cache_of(cache, options), position_ids
        y, selected = self.attend(*arguments, selected)
        return y, None, selected


def classes(fp8_indexer: bool) -> dict[type, type]:
    """{transformers' class: ours}."""
    return {
        theirs.GlmMoeDsaRMSNorm: SparseGlmMoeDsaRMSNorm,
        theirs.GlmMoeDsaIndexer: FP8GlmMoeDsaIndexer if fp8_indexer else SparseGlmMoeDsaIndexer,
        theirs.GlmMoeDsaAttention: SparseGlmMoeDsaAttention,
    }
