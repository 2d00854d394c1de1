"""Models for inference: what makes passes fast. `fuse` puts it in place once, after loading."""

from dsa_layers.engine.fuse import fuse, fused

__all__ = ["fuse", "fused"]
