"""DeepSeek-V3.2's and GLM-5's attention: `DSAAttention` with the parameters of transformers' layers."""

from typing import Any, ClassVar

import torch

from dsa_layers.batch.selected import Selected
from dsa_layers.cache.kv_cache import LayerCache
from dsa_layers.engine.paged_attention import PagedAttention
from dsa_layers.hf.lengths import TokenLengths
from dsa_layers.hf.paged_layer import PagedLayer, Storage, layer_of
from dsa_layers.hf.parts import AttentionInPlace, HeadWeightsInPlace, InPlaceOf, weight_of
from dsa_layers.layers.attention import DSAAttention
from dsa_layers.layers.indexer import WORKSPACE
from dsa_layers.layers.score_accumulators import SCORE_ACCUMULATORS

PAGE_SIZE = 64  # tokens, as the kernels of the byte layouts have them


class IndexerInPlace(HeadWeightsInPlace, InPlaceOf):
    """Goes before transformers' indexer and `LightningIndexer`, whose names it gives to what transformers has.

    quantize  whether scores are computed in FP8
    rope      how the rotary embedding turns index keys
    """

    quantize: ClassVar[bool] = False
    rope: ClassVar[dict[str, Any]]
    workspace, accumulators = WORKSPACE, SCORE_ACCUMULATORS

    @property
    def top_k(self) -> int:
        return self.index_topk


class SparseMLAInPlace(AttentionInPlace):
    """Goes before transformers' attention and `DSAAttention`, whose names it gives to what transformers has."""

    # What `IndexerStage` sets while indexers are trained, and `KeysRead` while keys that tokens read are counted.
    indexer_stage: ClassVar[None] = None
    key_counter: ClassVar[None] = None

    @property
    def n_heads(self) -> int:
        return self.num_heads

    @property
    def nope_dim(self) -> int:
        return self.qk_nope_head_dim

    @property
    def rope_dim(self) -> int:
        return self.qk_rope_head_dim

    @property
    def v_dim(self) -> int:
        return self.v_head_dim

    @property
    def read_directly(self) -> tuple[torch.Tensor, ...]:
        of_indexer = () if self.indexer is None else (self.indexer.k_norm.weight, self.indexer.k_norm.bias)
        return self.kv_a_layernorm.weight, *of_indexer

    @property
    def softmax_scale(self) -> float:
        return self.scaling

    def _up_projections(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        weight = weight_of(self.kv_b_proj, self.kv_lora_rank, dtype, self.kv_a_layernorm.weight.device)
        return weight.unflatten(0, (self.n_heads, self.nope_dim + self.v_dim)).split((self.nope_dim, self.v_dim), 1)

    def attend(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        lengths: TokenLengths,
        cache: Any,
        position_ids: torch.Tensor,
        selected: Selected | None = None,
    ) -> tuple[torch.Tensor, Selected]:
        """[B, S, hidden] -> (the same shape, the keys that the layer attended to). selected: of the layer before, for a
        layer without an indexer."""
        hidden_states = self.in_autocast(hidden_states)
        with_gradients = self.asks_for_gradients(hidden_states)
        layer = None
        if cache is not None:
            layer = layer_of(cache, self.layer_idx, self._storage(hidden_states), hidden_states)
            if with_gradients:
                layer = layer.leave_out(lengths.new)
            else:
                layer.reserve(lengths.counts(layer))
        options = {"consecutive": False, "separate": cache is None}
        packed = lengths.packed(position_ids, hidden_states.device, layer, **options)
        if packed is None:
            y, selected = torch.zeros_like(hidden_states), Selected(None, None)
        else:
            x, angles = packed.pack(hidden_states), packed.angles(position_embeddings, self.rope_dim)
            layer_cache = None if layer is None or with_gradients else self._cache(layer)
            plain = with_gradients or self.indexer_stage is not None
            with torch.set_grad_enabled(with_gradients):
                if plain:
                    rows = None if selected is None else selected.indices("rows", packed.batch)
                    y, rows = DSAAttention.forward(self, x, *angles, packed.batch, None, rows)
                    selected = Selected(rows, packed.batch)
                else:
                    y, selected = PagedAttention.forward(self, x, *angles, packed.batch, layer_cache, selected)
            y = packed.unpack(y)
        if layer is not None:
            layer.advance(lengths.counts(layer), lengths.new, [0] * len(hidden_states))
        return y, selected

    def _storage(self, x: torch.Tensor) -> Storage:
        pages = {"latent": (1, self.kv_lora_rank + self.rope_dim, x.dtype)}
        if self.indexer is not None:
            dim = self.indexer.head_dim
            pages["index"] = (1, dim + 4, torch.uint8) if self.indexer.quantize else (1, dim, x.dtype)
        return Storage(PAGE_SIZE, pages)

    def _cache(self, layer: PagedLayer) -> LayerCache:
        return LayerCache(layer["latent"], None if self.indexer is None else layer["index"])
