"""Whole passes of models with real layer sizes and random weights: the time of a token, by part of the model."""
