"""Layers, models, loaders and generation on top of `dsa`'s ops.

The names below are imported when they are first used: `import dsa_layers` alone does not import torch.
"""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsa_layers.batch.sequence_batch import SequenceBatch
    from dsa_layers.checkpoint.loading import load_model
    from dsa_layers.generation.generator import Generator
    from dsa_layers.generation.results import Completion
    from dsa_layers.generation.sampling import SamplingParams
    from dsa_layers.generation.tokenizer import Tokenizer

__all__ = ["SHIPPED_MODEL", "Completion", "Generator", "SamplingParams", "SequenceBatch", "Tokenizer", "load_model"]

# A checkpoint of a small model of Python source, trained by examples/train_indexer.py; its README.md is the model card.
SHIPPED_MODEL = Path(__file__).parent / "stdlib_model"

_MODULES = {
    "Completion": "dsa_layers.generation.results",
    "Generator": "dsa_layers.generation.generator",
    "SamplingParams": "dsa_layers.generation.sampling",
    "SequenceBatch": "dsa_layers.batch.sequence_batch",
    "Tokenizer": "dsa_layers.generation.tokenizer",
    "load_model": "dsa_layers.checkpoint.loading",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
