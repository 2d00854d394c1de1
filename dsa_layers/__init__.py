"""Layers, models, loaders and generation on top of `dsa`'s ops.

The public names are imported when they are first used, so `import dsa_layers` does not import torch.
"""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsa_layers.batch.decode_batch import DecodeBatch
    from dsa_layers.batch.sequence_batch import SequenceBatch
    from dsa_layers.cache.kv_cache import LayerCache
    from dsa_layers.engine.fuse import fuse, fused
    from dsa_layers.generation.engine import Engine
    from dsa_layers.generation.generator import Generator
    from dsa_layers.generation.requests import Completion, TokenEvent
    from dsa_layers.generation.sampling import SamplingParams
    from dsa_layers.io.loading import load_model
    from dsa_layers.io.save import convert_checkpoint, save_model
    from dsa_layers.io.tokenizer import Tokenizer
    from dsa_layers.layers.attention import DSAAttention
    from dsa_layers.layers.indexer import LightningIndexer
    from dsa_layers.layers.rope import RotaryEmbedding, rope_frequencies
    from dsa_layers.layers.trained_attention import TrainedAttention
    from dsa_layers.models.family import read_config
    from dsa_layers.models.precision import Precision
    from dsa_layers.parallel.context import ContextBatch
    from dsa_layers.parallel.ranks import Ranks
    from dsa_layers.tiny import write_tiny_checkpoint
    from dsa_layers.training import IndexerStage, next_tokens

__all__ = [
    "SHIPPED_MODEL",
    "Completion",
    "ContextBatch",
    "DSAAttention",
    "DecodeBatch",
    "Engine",
    "Generator",
    "IndexerStage",
    "LayerCache",
    "LightningIndexer",
    "Precision",
    "Ranks",
    "RotaryEmbedding",
    "SamplingParams",
    "SequenceBatch",
    "TokenEvent",
    "Tokenizer",
    "TrainedAttention",
    "convert_checkpoint",
    "fuse",
    "fused",
    "load_model",
    "next_tokens",
    "read_config",
    "rope_frequencies",
    "save_model",
    "write_tiny_checkpoint",
]

# The folder of a small checkpoint, which examples/train_indexer.py trained on Python source, and its model card,
# README.md.
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


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
