"""Lightning indexer: scores, top-k selection, and the projections that the scores read."""
