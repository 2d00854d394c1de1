"""A model's layers with their real sizes and random weights: what a token costs, and which part of it."""
