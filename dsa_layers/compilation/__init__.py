"""Compile the kernels of a model before the model runs."""
