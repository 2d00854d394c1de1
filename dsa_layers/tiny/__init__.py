"""A small checkpoint of each family in its published format, with random weights: for demonstrations and tests.

The dimensions that kernels care about are the real ones; the number of layers, heads and experts and the widths are
small. Its text is noise, but everything between `config.json` and a decoded token is as in the published checkpoint:
names, dtypes, FP8 blocks and FP4 groups, shards, tokenizer.
"""

from dsa_layers.tiny.writer import write_tiny_checkpoint

__all__ = ["write_tiny_checkpoint"]
