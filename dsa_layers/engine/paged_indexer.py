"""`LightningIndexer` for inference: over index keys in a paged cache."""

import torch

import dsa
from dsa_layers.batch.placement import Placement
from dsa_layers.batch.token_batch import TokenBatch
from dsa_layers.cache.kv_cache import LayerCache
from dsa_layers.engine.fp32_product import fp32_product
from dsa_layers.engine.layer_pass import LayerPass
from dsa_layers.layers.indexer import LightningIndexer, quantized_keys
from dsa_layers.layers.key_selection import Keys, select_packed, select_paged
from dsa_layers.layers.pass_checks import check_pages


class PagedIndexer(LightningIndexer):
    """`LightningIndexer` for inference. `select` is that of `Indexer`, with a cache.

    `PagedAttention` multiplies x and qr itself, in products that it shares, and calls `store` and `pick`.
    """

    @torch.no_grad()
    def select(
        self,
        x: torch.Tensor,
        qr: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: TokenBatch,
        cache: LayerCache | None = None,
        *,
        paged_slots: bool = False,
        store_only: bool = False,
    ) -> torch.Tensor | None:
        keys, step = self.wk(x), LayerPass(batch, (cos, sin), cache, in_pages=paged_slots)
        if cache is not None:
            self.store(keys, step)
        return None if store_only else self.pick(self.wq_b(qr), keys, self.head_weights(x), step, step.placement)

    def head_weights(self, x: torch.Tensor) -> torch.Tensor:
        """w fp32 [T, n_heads]."""
        return fp32_product(x, self.weights_proj.weight, self.n_heads**-0.5 * self.head_dim**-0.5)

    def store(self, keys: torch.Tensor, step: LayerPass[LayerCache]) -> None:
        """Writes the index keys of the new tokens to the cache. keys: wk(x) of all rows."""
        cache, batch = step.cache, step.batch
        if cache.index is None:
            raise ValueError("cache: must have index pages where a layer has an indexer, got LayerCache(latent, None)")
        check_pages(batch, cache.index.shape[1])
        if self.quantize != cache.index_is_fp8:
            raise ValueError(
                f"cache: an indexer with quantize={self.quantize} needs "
                f"{'FP8' if self.quantize else 'float'} index pages, got {cache.index.dtype}"
            )
        if self.quantize:
            norm = self.k_norm
            affine = norm.weight.float(), norm.bias.float()
            dsa.write_indexer_keys(keys, *affine, *step.angles, cache.index, batch.slots, eps=norm.eps, **self.rope)
        else:
            dsa.write_kv_cache(self.rotated_keys(keys, *step.angles), cache.index, batch.slots)

    def pick(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        weights: torch.Tensor,
        step: LayerPass[LayerCache],
        placement: Placement,
    ) -> torch.Tensor:
        """int32 [T, top_k]: what `select` gives for the local rows of `placement`, slots if `step.in_pages`.

        queries wq_b(qr) and weights `head_weights` of these rows; keys wk(x) of all rows, in the cache by `store`.
        """
        self.check_selects()
        batch, cache = step.batch, step.cache
        q = queries.unflatten(-1, (self.n_heads, self.head_dim))
        angles = placement.local_cached(step.angles[0]), placement.local_cached(step.angles[1])
        if self.quantize:
            q, weights = dsa.quantize_indexer_queries(q, weights, *angles, **self.rope)
        else:
            q = dsa.apply_rotary(q, *angles, **self.rope)
        page_size = batch.page_size if step.in_pages else None
        if self.quantize and step.decode:
            pages, lengths = (cache.index, batch.block_table), batch.visible_by_sequence
            return select_paged(q, *pages, weights, self.top_k, lengths, batch, batch.max_key_len, page_size)
        paging = {}
        if step.in_pages:
            sequences = placement.local_cached(batch.sequences)
            paging = {"block_table": batch.block_table, "page_size": page_size, "row_to_seq": sequences}
        starts, lengths, most = batch.visible_ranges
        ranges = placement.local_cached(starts), placement.local_cached(lengths), most
        options = {"accumulators": self.accumulators, "workspace": self.workspace}
        options["key_lens"] = batch.key_lens if batch.is_decode else None
        return select_packed(q, self._all_keys(keys, step), weights, self.top_k, *ranges, **options, **paging)

    def _all_keys(self, keys: torch.Tensor, step: LayerPass[LayerCache]) -> Keys:
        """All keys of the sequences packed in a row, with their scales if `quantize`. keys: wk(x) of all rows."""
        if step.cache is not None:
            read = dsa.read_indexer_cache if self.quantize else dsa.read_kv_cache
            return read(step.cache.index, step.batch.key_slots)
        k = self.rotated_keys(keys, *step.angles)
        return quantized_keys(k) if self.quantize else k
