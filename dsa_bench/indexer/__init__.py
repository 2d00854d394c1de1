"""Benchmarks of the lightning indexer: queries and keys, scores, and top-k selection."""
