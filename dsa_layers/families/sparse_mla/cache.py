"""The paged cache of so many layers, as a configuration and a precision describe it."""

from collections.abc import Sequence

import torch

from dsa_layers.cache.kv_cache import PagedKVCache
from dsa_layers.families.precision import Precision
from dsa_layers.families.sparse_mla.config import SparseMLAConfig


def paged_cache(
    config: SparseMLAConfig,
    precision: Precision,
    indexed: Sequence[bool],
    num_pages: int,
    page_size: int,
    device: torch.device | str,
    state_slots: int,
) -> PagedKVCache:
    """indexed: of each layer, whether it has an indexer."""
    return PagedKVCache(
        len(indexed),
        num_pages,
        page_size,
        latent_dim=config.kv_lora_rank + config.qk_rope_head_dim,
        index_dim=config.index_head_dim,
        latent="fp8" if precision.kv_cache == "fp8" else precision.dtype,
        index="fp8" if precision.fp8_indexer else precision.dtype,
        index_layers=[i for i, has_indexer in enumerate(indexed) if has_indexer],
        state_slots=state_slots,
        device=device,
    )
