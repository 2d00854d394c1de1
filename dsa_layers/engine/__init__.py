"""Faster versions of the layers, for inference. Call `dsa_layers.fuse` once after loading to install them."""
