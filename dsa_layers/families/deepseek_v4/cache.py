"""The cache of so many layers, as a configuration, a precision and their compressors describe it."""

from collections.abc import Sequence

import torch

from dsa_layers.cache.compressed_kv_cache import CompressedKVCache, EntryShape
from dsa_layers.families.deepseek_v4.config import DeepseekV4Config
from dsa_layers.families.precision import Precision
from dsa_layers.layers.compressed_attention import CompressedAttention
from dsa_layers.layers.compressor import Compressor


def compressed_cache(
    config: DeepseekV4Config,
    precision: Precision,
    layers: Sequence[CompressedAttention],
    num_pages: int,
    page_size: int,
    device: torch.device | str,
    state_slots: int,
) -> CompressedKVCache:
    return CompressedKVCache(
        [(_shape(layer.compressor), _shape(layer.indexer and layer.indexer.compressor)) for layer in layers],
        num_pages,
        page_size,
        state_slots,
        window=config.sliding_window,
        dim=config.head_dim,
        entries="fp8" if precision.kv_cache == "fp8" else precision.dtype,
        index="fp8" if precision.fp8_indexer else precision.dtype,
        device=device,
    )


def _shape(compressor: Compressor | None) -> EntryShape | None:
    return compressor and EntryShape(compressor.ratio, compressor.dim, compressor.state_shape)
