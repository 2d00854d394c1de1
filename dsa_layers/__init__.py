"""Layers, models, loaders and generation on top of `dsa`'s ops.

Public names are imported when they are first used: `import dsa_layers` does not import torch.
"""

import importlib
from pathlib import Path
from typing import Any

# Folder of a small checkpoint and its model card, README.md.
SHIPPED_MODEL = Path(__file__).parent / "stdlib_model"

_MODULES = {
    "Completion": "dsa_layers.generation.requests",
    "ContextBatch": "dsa_layers.parallel.context",
    "DSAAttention": "dsa_layers.layers.attention",
    "DecodeBatch": "dsa_layers.batch.decode_batch",
    "Engine": "dsa_layers.generation.engine",
    "Generator": "dsa_layers.generation.generator",
    "IndexerStage": "dsa_layers.training",
    "LayerCache": "dsa_layers.cache.kv_cache",
    "LightningIndexer": "dsa_layers.layers.indexer",
    "Precision": "dsa_layers.models.precision",
    "Ranks": "dsa_layers.parallel.ranks",
    "RotaryEmbedding": "dsa_layers.layers.rope",
    "SamplingParams": "dsa_layers.generation.sampling",
    "SequenceBatch": "dsa_layers.batch.sequence_batch",
    "TokenEvent": "dsa_layers.generation.requests",
    "Tokenizer": "dsa_layers.io.tokenizer",
    "TrainedAttention": "dsa_layers.layers.trained_attention",
    "convert_checkpoint": "dsa_layers.io.save",
    "fuse": "dsa_layers.engine.fuse",
    "fused": "dsa_layers.engine.fuse",
    "load_model": "dsa_layers.io.loading",
    "next_tokens": "dsa_layers.training",
    "read_config": "dsa_layers.models.family",
    "rope_frequencies": "dsa_layers.layers.rope",
    "save_model": "dsa_layers.io.save",
    "write_tiny_checkpoint": "dsa_layers.tiny",
}


__all__ = ["SHIPPED_MODEL", *_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
