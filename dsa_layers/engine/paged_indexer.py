"""`LightningIndexer`, `Compressor` and `CompressedIndexer` for inference, with keys and entries in a paged cache."""

from typing import Any

import torch

import dsa
from dsa_layers.batch.placement import Placement
from dsa_layers.batch.selectable_keys import SelectableKeys
from dsa_layers.batch.token_batch import TokenBatch, check_pages
from dsa_layers.batch.views import EntryView
from dsa_layers.cache.compressed_kv_cache import CompressedLayerCache, EntryCache
from dsa_layers.cache.kv_cache import LayerCache
from dsa_layers.engine import joint_linear
from dsa_layers.engine.fp32_product import fp32_product
from dsa_layers.engine.layer_pass import Angles, EntryPass, LayerPass
from dsa_layers.layers.compressor import CompressedIndexer, Compressor
from dsa_layers.layers.indexer import LightningIndexer
from dsa_layers.layers.key_selection import Keys, KeySelection, quantized_keys
from dsa_layers.layers.linear import FP32Linear


class PagedSelection(KeySelection):
    """Selection of keys for inference, with or without a paged cache."""

    def pick(
        self,
        queries: torch.Tensor,
        projected: Any,
        weights: torch.Tensor,
        step: LayerPass,
        placement: Placement,
    ) -> torch.Tensor:
        """Return int32 [T, selects]: the selected keys for the local rows of `placement`, padded with -1.

        The values are positions in the sequence, or cache slots if `step.in_pages`.

        queries    the index queries before rope, for the local rows
        projected  for all rows, wk(x) (`PagedIndexer`), `compressor.project(x)` (`PagedCompressedIndexer`) or
                   `pooled_inputs(x)` (`PagedPooledIndexer`). Not read with a cache, because the caller has already
                   written the keys
        weights    `head_weights` for the local rows
        """
        view = self.selectable(step.batch)
        angles = placement.local_cached(step.angles[0]), placement.local_cached(step.angles[1])
        q, weights = self.rotated_queries(queries, weights, angles)
        if self.quantize and step.decode:
            return self._select_in_pages(q, weights, view, step)
        starts, lengths, most = view.visible_ranges
        ranges = placement.local_cached(starts), placement.local_cached(lengths), most
        paging = None
        if step.in_pages:
            paging = {"block_table": view.block_table, "page_size": view.page_size}
            paging["row_to_seq"] = placement.local_cached(view.sequences)
        key_lens = view.key_lens if step.batch.is_decode else None
        keys = self._all_keys(projected, step, queries.dtype)
        return self.select_packed(q, keys, weights, ranges, key_lens, paging)

    def head_weights(self, x: torch.Tensor) -> torch.Tensor:
        return fp32_product(x, self.weights_proj.weight, self.weight_scale)

    def check_kind(self, cache: LayerCache) -> None:
        """Raise ValueError unless the index pages store FP8 keys if and only if `quantize` is set."""
        if self.quantize != cache.index_is_fp8:
            raise ValueError(
                f"cache: an indexer with quantize={self.quantize} needs "
                f"{'FP8' if self.quantize else 'float'} index pages, got {cache.index.dtype}"
            )

    def selectable(self, batch: TokenBatch) -> SelectableKeys:
        """Return the keys among which the indexer selects."""
        raise NotImplementedError

    def pages(self, step: LayerPass) -> torch.Tensor:
        """Return the pages of the index keys."""
        raise NotImplementedError

    def make_keys(self, projected: Any, step: LayerPass, dtype: torch.dtype) -> torch.Tensor:
        """Return all keys of a pass without a cache, in `dtype` and not quantised. projected: as in `pick`."""
        raise NotImplementedError

    def _all_keys(self, projected: Any, step: LayerPass, dtype: torch.dtype) -> Keys:
        """Return all keys of all sequences, packed; if `quantize`, in e4m3 with scales."""
        if step.cache is not None:
            read = dsa.read_indexer_cache if self.quantize else dsa.read_kv_cache
            return read(self.pages(step), self.selectable(step.batch).key_slots)
        keys = self.make_keys(projected, step, dtype)
        return quantized_keys(keys) if self.quantize else keys

    def _select_in_pages(
        self, q: torch.Tensor, weights: torch.Tensor, view: SelectableKeys, step: LayerPass
    ) -> torch.Tensor:
        """Select keys for the new tokens of a decoding pass. The scoring op reads FP8 keys directly from the pages."""
        lengths, most = view.visible_by_sequence, max(view.max_key_len, 1)
        q = q.unflatten(0, (len(lengths), -1))
        keys = self.pages(step), weights, lengths, view.block_table, view.index_schedule, most
        scores = dsa.fp8_paged_mqa_logits(q, *keys)
        paging = {}
        if step.in_pages:
            paging = {"block_table": view.block_table, "page_size": view.page_size}
            if q.shape[1] > 1:
                paging["row_to_seq"] = view.sequences
        return dsa.topk_indices(scores, self.selects, lengths=lengths.flatten(), **paging)


class PagedIndexer(PagedSelection, LightningIndexer):
    """`LightningIndexer` for inference, with or without a cache.

    `PagedAttention` computes wk(x) itself. It calls `write`, `queries` and `pick`, not `store` and `select`.
    """

    @torch.no_grad()
    def select(
        self, x: torch.Tensor, qr: torch.Tensor, rope: Angles, batch: TokenBatch, cache: LayerCache | None = None
    ) -> torch.Tensor:
        step = LayerPass(batch, rope, cache)
        queries = self.queries(qr, batch.positions)
        return self.pick(queries, self.wk(x), self.head_weights(x), step, step.placement)

    def queries(self, qr: torch.Tensor, positions: torch.Tensor, cast: joint_linear.Cast | None = None) -> torch.Tensor:
        """See `LightningIndexer.queries`. cast: qr in FP8 with scales, or None."""
        if self.q_input_norm is not None:
            qr, cast = self.q_input_norm(qr), None
        (q,) = joint_linear.multiply(qr, self.wq_b, cast=cast)
        return self.scaled(q, positions)

    @torch.no_grad()
    def store(self, x: torch.Tensor, rope: Angles, batch: TokenBatch, cache: LayerCache) -> None:
        self.write(self.wk(x), LayerPass(batch, rope, cache))

    def write(self, projected: torch.Tensor, step: LayerPass) -> None:
        """Write the index keys of the new tokens to the cache. projected: wk(x) of all rows."""
        cache, batch = step.cache, step.batch
        if cache.index is None:
            raise ValueError("cache: must have index pages where a layer has an indexer, got LayerCache(latent, None)")
        check_pages(batch, cache.index.shape[1])
        self.check_kind(cache)
        if self.quantize:
            norm = self.k_norm
            affine = norm.weight.float(), norm.bias.float()
            pages = cache.index, batch.slots
            dsa.write_indexer_keys(projected, *affine, *step.angles, *pages, eps=norm.eps, **self.rope)
        else:
            dsa.write_kv_cache(self.keys(projected, step.angles), cache.index, batch.slots)

    def selectable(self, batch: TokenBatch) -> TokenBatch:
        return batch

    def pages(self, step: LayerPass) -> torch.Tensor:
        return step.cache.index

    def make_keys(self, projected: torch.Tensor, step: LayerPass, dtype: torch.dtype) -> torch.Tensor:
        return self.keys(projected, step.angles)


Products = tuple[torch.Tensor, torch.Tensor]  # (wkv(x), wgate(x)) of a compressor, both fp32 [T, channels]


class PagedCompressor(Compressor):
    """`Compressor` for inference."""

    def project(self, x: torch.Tensor) -> Products:
        return joint_linear.multiply(x, *self.joint_layers())

    def entries(
        self, kv: torch.Tensor, gate: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: TokenBatch
    ) -> torch.Tensor:
        starts = batch.earlier_lens_tensor
        entries, tokens = dsa.compress_kv(kv, gate, self.ape, batch.cu_query_lens, starts, overlap=self.overlap)
        return dsa.apply_rotary(self.norm(entries), cos[tokens], sin[tokens], interleaved=True, dims="last")

    def store(self, products: Products, step: EntryPass, cache: EntryCache) -> None:
        """Write to the cache the entries that the new tokens complete, and update `EntryCache.state`."""
        batch = step.batch
        dsa.write_compressed_kv(
            *(*products, self.ape, self.norm.weight.float(), *step.entry_angles, cache.pages),
            *(batch.entries(self.ratio).slots, batch.cu_query_lens, batch.earlier_lens_tensor),
            *(cache.state, batch.state_slots_tensor),
            overlap=self.overlap,
            eps=self.norm.eps,
        )

    def joint_layers(self) -> tuple[FP32Linear, FP32Linear]:
        """Return the layers that can multiply x in one product (`join`)."""
        return self.wkv, self.wgate


class PagedCompressedIndexer(PagedSelection, CompressedIndexer):
    """`CompressedIndexer` for inference, with or without a cache.

    `PagedCompressedAttention` computes the projections of x and qr itself. It calls `PagedCompressor.store` to write
    the keys to the cache, and `pick` in place of `select`.
    """

    @torch.no_grad()
    def select(
        self,
        x: torch.Tensor,
        qr: torch.Tensor,
        rope: Angles,
        batch: TokenBatch,
        cache: CompressedLayerCache | None = None,
        *,
        entry_rope: Angles,
    ) -> torch.Tensor:
        step = EntryPass(batch, rope, cache, entry_angles=entry_rope)
        return self.pick(self.wq_b(qr), self.compressor.project(x), self.head_weights(x), step, step.placement)

    def selectable(self, batch: TokenBatch) -> EntryView:
        return batch.entries(self.compressor.ratio)

    def pages(self, step: EntryPass) -> torch.Tensor:
        return step.cache.index_entries.pages

    def make_keys(self, projected: Products, step: EntryPass, dtype: torch.dtype) -> torch.Tensor:
        return self.compressor.entries(*projected, *step.entry_angles, step.batch).to(dtype)
