"""DeepSeek-V4's compressor and indexer for inference: over compressed entries in a paged cache."""

import torch

import dsa
from dsa_layers.batch.placement import Placement
from dsa_layers.batch.token_batch import TokenBatch
from dsa_layers.cache.compressed_kv_cache import EntryCache
from dsa_layers.engine import joint_linear
from dsa_layers.engine.fp32_product import fp32_product
from dsa_layers.engine.layer_pass import Angles, EntryPass
from dsa_layers.layers.compressed_indexer import CompressedIndexer
from dsa_layers.layers.compressor import Compressor
from dsa_layers.layers.indexer import quantized_keys
from dsa_layers.layers.key_selection import select_packed, select_paged
from dsa_layers.layers.linear import FP32Linear

Products = tuple[torch.Tensor, torch.Tensor]  # KV, and Z without ape, fp32 [T, c]


class PagedCompressor(Compressor):
    """`Compressor` for inference, whose products with x come first, in one product with others that read x."""

    def project(self, x: torch.Tensor) -> Products:
        return joint_linear.multiply(x, *self.joint_layers())

    def entries(
        self, kv: torch.Tensor, gate: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: TokenBatch
    ) -> torch.Tensor:
        starts = batch.earlier_lens_tensor
        entries, tokens = dsa.compress_kv(kv, gate, self.ape, batch.cu_query_lens, starts, overlap=self.overlap)
        return dsa.apply_rotary(self.norm(entries), cos[tokens], sin[tokens], interleaved=True, dims="last")

    def store(self, products: Products, step: EntryPass, cache: EntryCache) -> None:
        """Writes the entries that the new tokens end to the cache, and what it keeps of unfinished blocks."""
        batch = step.batch
        dsa.write_compressed_kv(
            *(*products, self.ape, self.norm.weight.float(), *step.entry_angles, cache.pages),
            *(batch.entries(self.ratio).slots, batch.cu_query_lens, batch.earlier_lens_tensor),
            *(cache.state, batch.state_slots_tensor),
            overlap=self.overlap,
            eps=self.norm.eps,
        )

    def joint_layers(self) -> tuple[FP32Linear, FP32Linear]:
        """The layers whose products with x are one product."""
        return self.wkv, self.wgate


class PagedCompressedIndexer(CompressedIndexer):
    """`CompressedIndexer` for inference. `select` is that of `Indexer`, with a cache.

    `PagedCompressedAttention` multiplies x and qr itself, in products that it shares, stores keys by the compressor's
    `store`, and calls `pick`.
    """

    @torch.no_grad()
    def select(
        self,
        x: torch.Tensor,
        qr: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: TokenBatch,
        cache: EntryCache | None = None,
        *,
        entry_rope: Angles,
        paged_slots: bool = False,
        store_only: bool = False,
    ) -> torch.Tensor | None:
        if store_only and cache is None:
            return None
        keys = self.compressor.project(x)
        step = EntryPass(batch, (cos, sin), in_pages=paged_slots, entry_angles=entry_rope)
        if cache is not None:
            self.compressor.store(keys, step, cache)
        if store_only:
            return None
        return self.pick(self.wq_b(qr), keys, self.head_weights(x), step, cache, step.placement)

    def head_weights(self, x: torch.Tensor) -> torch.Tensor:
        """w fp32 [T, n_heads]."""
        return fp32_product(x, self.weights_proj.weight, self.weight_scale)

    def pick(
        self,
        queries: torch.Tensor,
        keys: Products | None,
        weights: torch.Tensor,
        step: EntryPass,
        cache: EntryCache | None,
        placement: Placement,
    ) -> torch.Tensor:
        """int32 [T, top_k]: what `select` gives for the local rows of `placement`, slots if `step.in_pages`.

        queries wq_b(qr) and weights `head_weights` of these rows. keys: the compressor's products with all rows; the
        cache has them already, if there is one.
        """
        batch = step.batch
        q = queries.unflatten(-1, (self.n_heads, self.head_dim))
        angles = placement.local_cached(step.angles[0]), placement.local_cached(step.angles[1])
        if self.quantize:
            q, weights = dsa.quantize_indexer_queries(q, weights, *angles, interleaved=True, dims="last")
        else:
            q = dsa.apply_rotary(q, *angles, interleaved=True, dims="last")
        entries = batch.entries(self.compressor.ratio)
        page_size = entries.page_size if step.in_pages else None
        if self.quantize and batch.is_decode and cache is not None:
            pages, lengths = (cache.pages, batch.block_table), entries.visible_by_sequence
            return select_paged(q, *pages, weights, self.top_k, lengths, entries, max(entries.most, 1), page_size)
        if cache is None:
            k = self.compressor.entries(*keys, *step.entry_angles, batch).to(queries.dtype)
            every = quantized_keys(k) if self.quantize else k
        else:
            read = dsa.read_indexer_cache if self.quantize else dsa.read_kv_cache
            every = read(cache.pages, entries.all_slots)
        paging = {}
        if step.in_pages:
            sequences = placement.local_cached(batch.sequences)
            paging = {"block_table": batch.block_table, "page_size": page_size, "row_to_seq": sequences}
        starts, lengths, most = entries.visible_ranges
        ranges = placement.local_cached(starts), placement.local_cached(lengths), most
        options = {"accumulators": self.accumulators, "workspace": self.workspace}
        options["key_lens"] = entries.lens if batch.is_decode else None
        return select_packed(q, every, weights, self.top_k, *ranges, **options, **paging)
