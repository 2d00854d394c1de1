"""Faster versions of layers for inference, which `dsa_layers.fuse` installs, and the split of a model over ranks."""
