"""DeepSeek-V4's classes in transformers, and ours in their places: `CompressedAttention` with their parameters."""

import math
from typing import Any

import torch
from torch import nn
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs

from dsa_layers.batch.token_batch import TokenBatch
from dsa_layers.cache.compressed_kv_cache import CompressedLayerCache, EntryCache
from dsa_layers.engine.paged_compressed_attention import PagedCompressedAttention
from dsa_layers.engine.paged_compressor import PagedCompressedIndexer, PagedCompressor
from dsa_layers.hf.lengths import TokenLengths
from dsa_layers.hf.paged_layer import PagedLayer, Storage, cache_of, layer_of
from dsa_layers.hf.parts import AttentionInPlace, HeadWeightsInPlace, InPlaceOf, RMSNormInPlace
from dsa_layers.layers.compressed_attention import Angles, CompressedAttention
from dsa_layers.layers.indexer import WORKSPACE
from dsa_layers.layers.rope import RopeAngles
from dsa_layers.layers.score_accumulators import SCORE_ACCUMULATORS

PAGE_SIZE = 256  # tokens: 64 entries of a layer with an indexer, 2 of the others, as the published model has them


class SparseDeepseekV4RMSNorm(RMSNormInPlace, theirs.DeepseekV4RMSNorm):
    original = theirs.DeepseekV4RMSNorm


class CompressorInPlace(InPlaceOf):
    """Goes before transformers' compressor and `Compressor`, whose names it gives to what transformers has."""

    @property
    def dim(self) -> int:
        return self.head_dim

    @property
    def ratio(self) -> int:
        return self.compress_rate

    @property
    def ape(self) -> torch.Tensor:
        return self.position_bias.float()

    @property
    def norm(self) -> nn.Module:
        return self.kv_norm

    def joint_layers(self) -> tuple[nn.Module, ...]:
        return self.kv_proj, self.gate_proj


class SparseDeepseekV4HCACompressor(CompressorInPlace, theirs.DeepseekV4HCACompressor, PagedCompressor):
    original, overlap = theirs.DeepseekV4HCACompressor, False


class SparseDeepseekV4CSACompressor(CompressorInPlace, theirs.DeepseekV4CSACompressor, PagedCompressor):
    original, overlap = theirs.DeepseekV4CSACompressor, True


COMPRESSORS = {kind.original: kind for kind in (SparseDeepseekV4HCACompressor, SparseDeepseekV4CSACompressor)}


class SparseDeepseekV4Indexer(
    HeadWeightsInPlace, CompressorInPlace, theirs.DeepseekV4Indexer, PagedCompressedIndexer, PagedCompressor
):
    """transformers' indexer, which is a compressor, too."""

    original, overlap = theirs.DeepseekV4Indexer, True
    quantize, workspace, accumulators = False, WORKSPACE, SCORE_ACCUMULATORS

    @property
    def n_heads(self) -> int:
        return self.num_heads

    @property
    def top_k(self) -> int:
        return self.index_topk

    @property
    def wq_b(self) -> nn.Module:
        return self.q_b_proj

    @property
    def weights_proj(self) -> nn.Module:
        return self.scorer.weights_proj

    @property
    def compressor(self) -> "SparseDeepseekV4Indexer":
        return self


class FP8DeepseekV4Indexer(SparseDeepseekV4Indexer):
    quantize = True


class SparseDeepseekV4Attention(AttentionInPlace, theirs.DeepseekV4Attention, PagedCompressedAttention):
    """A sequence's entries are made of its tokens, wherever padding is; transformers' are made of padding, too."""

    original = theirs.DeepseekV4Attention
    key_counter = None

    @property
    def n_heads(self) -> int:
        return self.num_heads

    @property
    def dim(self) -> int:
        return self.head_dim

    @property
    def window(self) -> int:
        return self.sliding_window

    @property
    def eps(self) -> float:
        return self.q_b_norm.eps

    @property
    def wq_a(self) -> nn.Module:
        return self.q_a_proj

    @property
    def q_norm(self) -> nn.Module:
        return self.q_a_norm

    @property
    def wq_b(self) -> nn.Module:
        return self.q_b_proj

    @property
    def wkv(self) -> nn.Module:
        return self.kv_proj

    @property
    def read_directly(self) -> tuple[torch.Tensor, ...]:
        compressors = [one for one in (self.compressor, self.indexer) if one is not None]
        of_compressors = [weight for one in compressors for weight in (one.position_bias, one.kv_norm.weight)]
        return self.kv_norm.weight, *of_compressors

    @property
    def attn_sink(self) -> torch.Tensor:
        return self.sinks.float()

    @property
    def indexer(self) -> SparseDeepseekV4Indexer | None:
        return getattr(self.compressor, "indexer", None)

    def takes_lengths(self) -> None:
        super().takes_lengths()
        # transformers finds compressors in a table of its own, not by the names that `register` knows.
        if type(self.compressor) in COMPRESSORS:
            self.compressor.__class__ = COMPRESSORS[type(self.compressor)]

    def _casts_results(self, rope: Angles) -> bool:
        return False  # transformers' grouped projection takes no cast

    def _project(self, out: torch.Tensor, rope: Angles, batch: TokenBatch) -> torch.Tensor:
        out = self._rotate(out, RopeAngles.of(rope).back)
        groups = out.flatten(1).unflatten(-1, (self.config.o_groups, -1))
        return self.o_b_proj(self.o_a_proj(groups).flatten(1))

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: dict[str, tuple[torch.Tensor, torch.Tensor]],
        position_ids: torch.Tensor,
        attention_mask: TokenLengths,
        cache: Any = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        self.check(attention_mask, position_ids, options)
        hidden_states = self.in_autocast(hidden_states)
        lengths, layer = attention_mask, None
        with_gradients = self.asks_for_gradients(hidden_states)
        cache = cache_of(cache, options)
        if cache is not None:
            layer = layer_of(cache, self.layer_idx, self._storage(hidden_states), hidden_states)
            if with_gradients:
                layer = layer.leave_out(lengths.new)
            else:
                layer.reserve(lengths.counts(layer))
        how = {"consecutive": True, "separate": cache is None}
        packed = lengths.packed(position_ids, hidden_states.device, layer, **how)
        if packed is None:
            return torch.zeros_like(hidden_states), None
        x, rope = packed.pack(hidden_states), packed.angles(position_embeddings[self.rope_layer_type], self._rope_dim)
        entry_rope = None
        if self.compressor is not None:
            entry_rope = packed.entry_angles(self.compressor.rotary_emb, self.compressor.ratio, x)
        layer_cache = None if layer is None or with_gradients else self._cache(layer)
        with torch.set_grad_enabled(with_gradients):
            forward = CompressedAttention.forward if with_gradients else PagedCompressedAttention.forward
            y = forward(self, x, rope, entry_rope, packed.batch, layer_cache)
        if layer is not None:
            layer.advance(lengths.counts(layer), lengths.new, packed.offsets)
        return packed.unpack(y), None

    @property
    def _rope_dim(self) -> int:
        return self.config.qk_rope_head_dim

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
        def entries(name: str, there: bool) -> EntryCache | None:
            return EntryCache(layer[name], layer[f"{name}_state"]) if there else None

        compressed = entries("entries", self.compressor is not None)
        return CompressedLayerCache(layer["window"], compressed, entries("index_entries", self.indexer is not None))


def classes(fp8_indexer: bool) -> dict[type, type]:
    """{transformers' class: ours}."""
    return {
        theirs.DeepseekV4RMSNorm: SparseDeepseekV4RMSNorm,
        **COMPRESSORS,
        theirs.DeepseekV4Indexer: FP8DeepseekV4Indexer if fp8_indexer else SparseDeepseekV4Indexer,
        theirs.DeepseekV4Attention: SparseDeepseekV4Attention,
    }
