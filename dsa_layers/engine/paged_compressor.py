"""DeepSeek-V4's compressor and indexer for inference, with compressed entries in a paged cache."""

import torch

import dsa
from dsa_layers.batch.entry_view import EntryView
from dsa_layers.batch.token_batch import TokenBatch
from dsa_layers.cache.compressed_kv_cache import CompressedLayerCache, EntryCache
from dsa_layers.engine import joint_linear
from dsa_layers.engine.fp32_product import fp32_product
from dsa_layers.engine.layer_pass import Angles, EntryPass
from dsa_layers.engine.paged_indexer import PagedSelection
from dsa_layers.layers.compressed_indexer import CompressedIndexer
from dsa_layers.layers.compressor import Compressor
from dsa_layers.layers.linear import FP32Linear

Products = tuple[torch.Tensor, torch.Tensor]  # fp32 [T, c]: KV = wkv(x), and Z = wgate(x) before ape is added


class PagedCompressor(Compressor):
    """`Compressor` for inference. It computes wkv(x) and wgate(x) as one product, before it compresses them."""

    def project(self, x: torch.Tensor) -> Products:
        return joint_linear.multiply(x, *self.joint_layers())

    def entries(
        self, kv: torch.Tensor, gate: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: TokenBatch
    ) -> torch.Tensor:
        starts = batch.earlier_lens_tensor
        entries, tokens = dsa.compress_kv(kv, gate, self.ape, batch.cu_query_lens, starts, overlap=self.overlap)
        return dsa.apply_rotary(self.norm(entries), cos[tokens], sin[tokens], interleaved=True, dims="last")

    def store(self, products: Products, step: EntryPass, cache: EntryCache) -> None:
        """Write the entries that the new tokens complete, and the state of incomplete blocks, to the cache."""
        batch = step.batch
        dsa.write_compressed_kv(
            *(*products, self.ape, self.norm.weight.float(), *step.entry_angles, cache.pages),
            *(batch.entries(self.ratio).slots, batch.cu_query_lens, batch.earlier_lens_tensor),
            *(cache.state, batch.state_slots_tensor),
            overlap=self.overlap,
            eps=self.norm.eps,
        )

    def joint_layers(self) -> tuple[FP32Linear, FP32Linear]:
        """Return the layers that share one product with x."""
        return self.wkv, self.wgate


class PagedCompressedIndexer(PagedSelection[Products], CompressedIndexer):
    """`CompressedIndexer` for inference, with a cache.

    `PagedCompressedAttention` computes the indexer's projections of x and qr itself, so that they can share products
    with its other projections. It writes the keys to the cache with `PagedCompressor.store` and then calls `pick`.
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

    def head_weights(self, x: torch.Tensor) -> torch.Tensor:
        """Return the weights of the index heads, fp32 [T, n_heads]."""
        return fp32_product(x, self.weights_proj.weight, self.weight_scale)

    def selectable(self, batch: TokenBatch) -> EntryView:
        return batch.entries(self.compressor.ratio)

    def pages(self, step: EntryPass[CompressedLayerCache]) -> torch.Tensor:
        return step.cache.index_entries.pages

    def make_keys(self, projected: Products, step: EntryPass[CompressedLayerCache], dtype: torch.dtype) -> torch.Tensor:
        return self.compressor.entries(*projected, *step.entry_angles, step.batch).to(dtype)
