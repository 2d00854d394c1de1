"""Lightning indexer: scores, top-k selection, and the FP8 queries and keys that the scores read."""
