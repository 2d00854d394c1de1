"""Faster versions of the layers, for inference. Call `fuse` once after loading to install them in a model."""

from dsa_layers.engine.fuse import fuse, fused

__all__ = ["fuse", "fused"]
