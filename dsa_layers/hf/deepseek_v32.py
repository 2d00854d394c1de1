"""DeepSeek-V3.2's classes in transformers, and ours in their places."""

from typing import Any, ClassVar

import torch
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as theirs

from dsa_layers.engine.paged_attention import PagedAttention
from dsa_layers.engine.paged_indexer import PagedIndexer
from dsa_layers.hf.lengths import TokenLengths
from dsa_layers.hf.paged_layer import cache_of
from dsa_layers.hf.parts import RMSNormInPlace
from dsa_layers.hf.sparse_mla import IndexerInPlace, SparseMLAInPlace


class SparseDeepseekV32RMSNorm(RMSNormInPlace, theirs.DeepseekV32RMSNorm):
    original = theirs.DeepseekV32RMSNorm


class SparseDeepseekV32Indexer(IndexerInPlace, theirs.DeepseekV32Indexer, PagedIndexer):
    original = theirs.DeepseekV32Indexer
    rope: ClassVar[dict[str, Any]] = {"interleaved": False, "dims": "first"}


class FP8DeepseekV32Indexer(SparseDeepseekV32Indexer):
    quantize = True


class SparseDeepseekV32Attention(SparseMLAInPlace, theirs.DeepseekV32Attention, PagedAttention):
    original = theirs.DeepseekV32Attention

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: TokenLengths,
        cache: Any = None,
        position_ids: torch.Tensor | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        self.check(attention_mask, position_ids, options)
        arguments = hidden_states, position_embeddings, attention_mask, cache_of(cache, options), position_ids
        y, _ = self.attend(*arguments)
        return y, None


def classes(fp8_indexer: bool) -> dict[type, type]:
    """{transformers' class: ours}."""
    return {
        theirs.DeepseekV32RMSNorm: SparseDeepseekV32RMSNorm,
        theirs.DeepseekV32Indexer: FP8DeepseekV32Indexer if fp8_indexer else SparseDeepseekV32Indexer,
        theirs.DeepseekV32Attention: SparseDeepseekV32Attention,
    }
