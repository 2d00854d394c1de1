"""Layers, models, loaders and generation on top of `dsa`'s ops."""

from dsa_layers.generation import Completion, Generator
from dsa_layers.models.loading import load_model
from dsa_layers.sampling import SamplingParams
from dsa_layers.sequence_batch import SequenceBatch
from dsa_layers.tokenizer import Tokenizer

__all__ = ["Completion", "Generator", "SamplingParams", "SequenceBatch", "Tokenizer", "load_model"]
