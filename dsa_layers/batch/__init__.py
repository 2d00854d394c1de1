"""Batches: the tokens that a forward pass computes, and the locations of their keys."""
