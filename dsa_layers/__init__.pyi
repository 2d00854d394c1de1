"""The types of the public names, which `dsa_layers/__init__.py` imports when they are first used."""

from pathlib import Path

from dsa_layers.batch.decode_batch import DecodeBatch as DecodeBatch
from dsa_layers.batch.sequence_batch import SequenceBatch as SequenceBatch
from dsa_layers.cache.kv_cache import LayerCache as LayerCache
from dsa_layers.engine.fuse import fuse as fuse
from dsa_layers.engine.fuse import fused as fused
from dsa_layers.generation.engine import Engine as Engine
from dsa_layers.generation.generator import Generator as Generator
from dsa_layers.generation.requests import Completion as Completion
from dsa_layers.generation.requests import TokenEvent as TokenEvent
from dsa_layers.generation.sampling import SamplingParams as SamplingParams
from dsa_layers.io.loading import load_model as load_model
from dsa_layers.io.save import convert_checkpoint as convert_checkpoint
from dsa_layers.io.save import save_model as save_model
from dsa_layers.io.tokenizer import Tokenizer as Tokenizer
from dsa_layers.layers.attention import DSAAttention as DSAAttention
from dsa_layers.layers.indexer import LightningIndexer as LightningIndexer
from dsa_layers.layers.rope import RotaryEmbedding as RotaryEmbedding
from dsa_layers.layers.rope import rope_frequencies as rope_frequencies
from dsa_layers.layers.trained_attention import TrainedAttention as TrainedAttention
from dsa_layers.models.family import read_config as read_config
from dsa_layers.models.precision import Precision as Precision
from dsa_layers.parallel.context import ContextBatch as ContextBatch
from dsa_layers.parallel.ranks import Ranks as Ranks
from dsa_layers.tiny import write_tiny_checkpoint as write_tiny_checkpoint
from dsa_layers.training import IndexerStage as IndexerStage
from dsa_layers.training import next_tokens as next_tokens

SHIPPED_MODEL: Path
