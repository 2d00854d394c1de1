"""Indexer training: attention, losses and gradients of the warm-up and of the sparse stage."""
