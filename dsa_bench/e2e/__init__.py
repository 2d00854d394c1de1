"""Benchmarks of whole passes: time and memory of layers with the published models' sizes and random weights, and
errors of small models with trained weights."""
