"""Attention of transformers' DeepSeek-V4 models: dsa's `CompressedAttention` on the parameters of transformers'
layers."""

import math
from typing import Any

import torch
from torch import nn
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs

from dsa_layers.batch.token_batch import TokenBatch
from dsa_layers.cache.compressed_kv_cache import CompressedLayerCache, EntryCache
from dsa_layers.engine.paged_compressed_attention import PagedCompressedAttention
from dsa_layers.engine.paged_indexer import PagedCompressedIndexer, PagedCompressor
from dsa_layers.hf.lengths import Pass
from dsa_layers.hf.paged_layer import PagedLayer, Storage
from dsa_layers.hf.parts import AttentionInPlace, HeadWeightsInPlace, RMSNormInPlace, alias
from dsa_layers.layers.compressed_attention import Angles, CompressedAttention
from dsa_layers.layers.key_selection import SCORE_ACCUMULATORS, WORKSPACE
from dsa_layers.layers.rope import RopeAngles

# The number of tokens per page is the least common multiple of PAGE_SIZE and the compression rates: with the published
# rates, 256, so that a page has 64 entries in a layer with an indexer, and 2 in a heavily compressed layer.
PAGE_SIZE = 256


class SparseDeepseekV4RMSNorm(RMSNormInPlace, theirs.DeepseekV4RMSNorm):
    """Replaces DeepseekV4RMSNorm."""


class CompressorInPlace:
    """Base class of compressors. It gives transformers' attributes the names that `PagedCompressor` reads. A subclass
    lists this class, transformers' class and `PagedCompressor`, in this order, so that the first overrides the second
    and the second overrides the third."""

    dim = alias("head_dim")
    ratio = alias("compress_rate")
    norm = alias("kv_norm")

    @property
    def ape(self) -> torch.Tensor:
        return self.position_bias.float()

    def joint_layers(self) -> tuple[nn.Module, ...]:
        return self.kv_proj, self.gate_proj


class SparseDeepseekV4HCACompressor(CompressorInPlace, theirs.DeepseekV4HCACompressor, PagedCompressor):
    """Replaces DeepseekV4HCACompressor."""

    overlap = False


class SparseDeepseekV4CSACompressor(CompressorInPlace, theirs.DeepseekV4CSACompressor, PagedCompressor):
    """Replaces DeepseekV4CSACompressor."""

    overlap = True


class SparseDeepseekV4Indexer(
    HeadWeightsInPlace, CompressorInPlace, theirs.DeepseekV4Indexer, PagedCompressedIndexer, PagedCompressor
):
    """Replaces DeepseekV4Indexer. It is also the indexer's compressor."""

    overlap, quantize = True, False
    workspace, accumulators = WORKSPACE, SCORE_ACCUMULATORS
    n_heads = alias("num_heads")
    top_k = alias("index_topk")
    wq_b = alias("q_b_proj")

    @property
    def weights_proj(self) -> nn.Module:
        return self.scorer.weights_proj

    @property
    def compressor(self) -> "SparseDeepseekV4Indexer":
        return self


class SparseDeepseekV4Attention(AttentionInPlace, theirs.DeepseekV4Attention, PagedCompressedAttention):
    """Replaces DeepseekV4Attention. Its compressed entries exclude padding, which transformers' layer includes."""

    consecutive = True
    n_heads = alias("num_heads")
    dim = alias("head_dim")
    window = alias("sliding_window")
    wq_a = alias("q_a_proj")
    q_norm = alias("q_a_norm")
    wq_b = alias("q_b_proj")
    wkv = alias("kv_proj")

    @property
    def eps(self) -> float:
        return self.q_b_norm.eps

    @property
    def attn_sink(self) -> torch.Tensor:
        return self.sinks.float()

    @property
    def indexer(self) -> SparseDeepseekV4Indexer | None:
        return getattr(self.compressor, "indexer", None)

    def _casts_results(self, rope: Angles) -> bool:
        return False  # transformers' grouped output projection does not accept FP8 values with scales

    def _project(self, out: torch.Tensor, rope: Angles, batch: TokenBatch) -> torch.Tensor:
        out = self._rotate(out, RopeAngles.of(rope).back)
        groups = out.flatten(1).unflatten(-1, (self.config.o_groups, -1))
        return self.o_b_proj(self.o_a_proj(groups).flatten(1))

    def attend_packed(
        self, x: torch.Tensor, rope: Any, tokens: Pass, layer: PagedLayer | None, selected: None
    ) -> tuple[torch.Tensor, None]:
        angles = tokens.angles(rope[self.rope_layer_type], self.config.qk_rope_head_dim)
        entry_angles = None
        if self.compressor is not None:
            entry_angles = tokens.entry_angles(self.compressor.rotary_emb, self.compressor.ratio, x)
        forward = CompressedAttention.forward if torch.is_grad_enabled() else PagedCompressedAttention.forward
        cache = None if layer is None else self._cache(layer)
        return forward(self, x, angles, entry_angles, tokens.batch, cache), None

    def _storage(self, x: torch.Tensor) -> Storage:
        page_size = math.lcm(PAGE_SIZE, *self.config.compress_rates.values())
        by_sequence, pages = {"window": ((self.window, 1, self.dim), x.dtype)}, {}
        if self.compressor is not None:
            pages["entries"] = self.compressor.ratio, self.dim, x.dtype
            by_sequence["entries_state"] = self.compressor.state_shape, torch.float32
        if self.indexer is not None:
            dim = self.indexer.dim
            width, dtype = (dim + 4, torch.uint8) if self.indexer.quantize else (dim, x.dtype)
            pages["index_entries"] = self.indexer.ratio, width, dtype
            by_sequence["index_entries_state"] = self.indexer.state_shape, torch.float32
        return Storage(page_size, pages, by_sequence)

    def _cache(self, layer: PagedLayer) -> CompressedLayerCache:
        entries = index_entries = None
        if self.compressor is not None:
            entries = EntryCache(layer["entries"], layer["entries_state"])
        if self.indexer is not None:
            index_entries = EntryCache(layer["index_entries"], layer["index_entries_state"])
        return CompressedLayerCache(layer["window"], entries, index_entries)


CLASSES: dict[type, type] = {
    theirs.DeepseekV4RMSNorm: SparseDeepseekV4RMSNorm,
    theirs.DeepseekV4HCACompressor: SparseDeepseekV4HCACompressor,
    theirs.DeepseekV4CSACompressor: SparseDeepseekV4CSACompressor,
    theirs.DeepseekV4Indexer: SparseDeepseekV4Indexer,
    theirs.DeepseekV4Attention: SparseDeepseekV4Attention,
}
