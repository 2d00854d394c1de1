"""Faster versions of the layers, for inference, and the split of a model over ranks. `dsa_layers.fuse` installs the
faster versions. `load_model` calls `fuse` unless the model is trainable."""
