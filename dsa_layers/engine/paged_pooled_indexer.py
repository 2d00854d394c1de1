"""`PooledIndexer` for inference, with pool keys in a paged cache."""

import torch

import dsa
from dsa_layers.batch.token_batch import TokenBatch, check_pages
from dsa_layers.cache.delta_kv_cache import PooledLayerCache
from dsa_layers.engine.layer_pass import LayerPass
from dsa_layers.engine.paged_indexer import PagedSelection
from dsa_layers.layers.key_selection import quantized_keys
from dsa_layers.layers.pooled_indexer import PooledIndexer, tokens_of_pools
from dsa_layers.layers.rope import Angles


class PagedPooledIndexer(PagedSelection, PooledIndexer):
    """`PooledIndexer` for inference, with or without a cache. All arguments have the rows of all ranks."""

    selectable = PooledIndexer.selectable  # overrides the abstract `PagedSelection.selectable`

    @torch.no_grad()
    def select(
        self,
        x: torch.Tensor,
        qr: torch.Tensor,
        rope: Angles,
        batch: TokenBatch,
        cache: PooledLayerCache | None = None,
    ) -> torch.Tensor:
        step = LayerPass(batch, rope, cache)
        inputs = self.pooled_inputs(x) if cache is None else None
        pools = self.pick(self.wq_b(qr), inputs, self.head_weights(x), step, step.placement)
        return tokens_of_pools(pools, batch.visible_keys, self.pool)

    @torch.no_grad()
    def store(self, x: torch.Tensor, rope: Angles, batch: TokenBatch, cache: PooledLayerCache) -> None:
        """Write `pooled_inputs` of the new tokens to the ring. Write to the pages the keys of the pools that these
        tokens complete."""
        check_pages(batch, cache.page_size)
        self.check_kind(cache)
        inputs = self.pooled_inputs(x)
        keys = self.pool_keys(self._last_inputs(inputs, batch, cache.pool_inputs)).to(x.dtype)
        slots = batch.entries(self.pool).slots  # -1 for tokens that complete no pool
        if self.quantize:
            dsa.write_indexer_cache(*quantized_keys(keys), cache.index, slots)
        else:
            dsa.write_kv_cache(keys, cache.index, slots)

    def _last_inputs(self, inputs: torch.Tensor, batch: TokenBatch, ring: torch.Tensor) -> torch.Tensor:
        """Return [T, pool, 2 * head_dim]: the inputs of each new token and of the pool - 1 tokens before it. Also write
        the new tokens' inputs to the ring. Values before a sequence's first token have no meaning."""
        windows = batch.windows(self.pool, ring.shape[1])
        if batch.is_decode:
            dsa.write_kv_cache(inputs, ring, windows.slots)
            return dsa.read_kv_cache(ring, windows.decode_slots.flatten(0, 1), dtype=inputs.dtype)
        rows = inputs
        if any(windows.earlier_lens):
            earlier = dsa.read_kv_cache(ring, windows.earlier_slots, dtype=inputs.dtype)
            rows = torch.cat((earlier, inputs))
            rows = rows if windows.in_order else rows[windows.order]
        dsa.write_kv_cache(inputs, ring, windows.slots)
        return rows[windows.indices.clamp(min=0)]

    def pages(self, step: LayerPass) -> torch.Tensor:
        return step.cache.index

    def make_keys(self, projected: torch.Tensor, step: LayerPass, dtype: torch.dtype) -> torch.Tensor:
        return self.packed_keys(projected, step.batch).to(dtype)
