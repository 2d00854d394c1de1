"""PyTorch references of the lightning indexer: the preparation of queries and keys, scores, and top-k selection."""
