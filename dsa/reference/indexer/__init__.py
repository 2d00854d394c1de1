"""PyTorch references of the lightning indexer: the preparation of its queries and keys, scores, and top-k selection."""
